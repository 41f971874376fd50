"""Open exercise of phase 13: when to publish what a trainer has made: fresh answers against stalls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

from labs.kit.judges import Refused

TITLE = "when to publish: fresh answers, and few stalls"
UNIT = "of what it costs to publish each third version"
BUDGET = 0.97

VERSIONS, MOST_BEHIND = 400, 6
# ms: a step, a token that is computed anew, new weights into their slot
STEP, PREFILL, SWAP = 12.0, 0.05, 15.0
STALE = 200.0  # ms that an answer may take longer, for each version that it is fresher
BATCH = 24  # requests that run at a time


class Arrival(NamedTuple):
    """ms: when it comes; prompt, answer: tokens"""

    ms: float
    prompt: int
    answer: int


class Traffic(NamedTuple):
    """versions: ms at which the trainer has made each, in order"""

    arrivals: list[Arrival]
    versions: list[float]


class Bill(NamedTuple):
    """What publishing has cost.

    published   how often
    stalls      ms by which the requests together waited longer
    behind      versions by which the answers together were too old
    """

    published: int
    stalls: float
    behind: int

    @property
    def ms(self) -> float:
        return self.stalls + STALE * self.behind


@dataclass
class Running:
    prompt: int
    left: int
    computed: int = 0

    @property
    def tokens(self) -> int:
        """That are computed anew with other weights."""
        return self.prompt + self.computed


def traffic_of(rng: Random) -> Traffic:
    """Requests in bursts with pauses between, and a version every 200 to 900 ms."""
    versions, now = [], 0.0
    for _ in range(VERSIONS):
        now += rng.uniform(200, 900)
        versions.append(now)
    arrivals, at = [], 0.0
    while at < versions[-1]:
        gap, until = rng.choice((25.0, 60.0, 150.0, 600.0)), at + rng.uniform(500, 3000)
        while at < until:
            at += rng.expovariate(1 / gap)
            arrivals.append(Arrival(at, rng.randint(20, 300), rng.randint(5, 80)))
    return Traffic(arrivals, versions)


def serve(policy: Any, traffic: Traffic) -> Bill:
    """The bill of a policy, which is asked before every step in which there is a newer version than what serves.

    A request that runs when a version is published goes on with it, and its tokens are computed anew, since keys and
    values of other weights are of no use. So an answer is of the version that serves when it ends.
    """
    arrivals, coming = traffic.arrivals, 0
    now, serving, latest = 0.0, 0, 0
    running: list[Running] = []
    waiting: list[Arrival] = []
    published = behind = 0
    stalls = 0.0
    while coming < len(arrivals) or waiting or running:
        if not (running or waiting):
            now = max(now, arrivals[coming].ms)
        while coming < len(arrivals) and arrivals[coming].ms <= now:
            waiting.append(arrivals[coming])
            coming += 1
        while latest < len(traffic.versions) and traffic.versions[latest] <= now:
            latest += 1
        if latest > serving and _says(policy, now, latest - serving, running, len(waiting)):
            stall = SWAP + PREFILL * sum(request.tokens for request in running)
            now, serving, published = now + stall, latest, published + 1
            stalls += stall * (len(running) + len(waiting))
        while waiting and len(running) < BATCH:
            running.append(Running(waiting[0].prompt, waiting.pop(0).answer))
            now += PREFILL * running[-1].prompt
        now += STEP
        for request in running:
            request.left, request.computed = request.left - 1, request.computed + 1
        ended = sum(request.left == 0 for request in running)
        if ended and latest - serving > MOST_BEHIND:
            raise Refused(
                f"at {now:.0f} ms an answer is {latest - serving} versions behind, and {MOST_BEHIND} is the most"
            )
        behind += ended * (latest - serving)
        running = [request for request in running if request.left]
    return Bill(published, stalls, behind)


def _says(policy: Any, now: float, behind: int, running: Sequence[Running], waiting: int) -> bool:
    """What the policy decides. It is given copies."""
    said = policy.publish(now, behind, [(request.tokens, request.left) for request in running], waiting)
    if said is not True and said is not False:
        raise Refused(f"publish() gave {said!r}, and it is True or False")
    return said


class AtOnce:
    """Each version as soon as there is one."""

    def publish(self, now: float, behind: int, running: list[tuple[int, int]], waiting: int) -> bool:
        return True


class EveryFew:
    """Each third version."""

    def publish(self, now: float, behind: int, running: list[tuple[int, int]], waiting: int) -> bool:
        return behind >= 3


class WhenIdle:
    """While nobody runs, and else when it must be."""

    def publish(self, now: float, behind: int, running: list[tuple[int, int]], waiting: int) -> bool:
        return not running or behind >= MOST_BEHIND


KNOWN = {"at once": AtOnce, "each third": EveryFew, "when idle": WhenIdle}


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """1 is who publishes each third version, and 0 would be fresh answers without a stall."""
    policy, traffic = load().Policy(), traffic_of(rng)
    return share(serve(policy, traffic), traffic)


def share(bill: Bill, traffic: Traffic) -> float:
    return bill.ms / serve(EveryFew(), traffic).ms


def beside(rng: Random) -> list[str]:
    """What policies that have a name come to on the same input: a line each."""
    traffic = traffic_of(rng)
    bills = {name: serve(make(), traffic) for name, make in KNOWN.items()}
    return [
        f"{share(bill, traffic):10.4g}  {name}: {bill.published} published, {bill.stalls / 1e3:.0f} s of stalls, "
        f"{bill.behind:,} versions behind"
        for name, bill in bills.items()
    ]
