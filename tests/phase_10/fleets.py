"""Small fleets on a virtual clock, and replicas that do what a script says."""

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.policies.routing import least_loaded
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.fleet import Fleet, adapters_of_ranks
from minivllm.simulate.replica import Replica, ReplicaConfig, Served
from minivllm.simulate.traffic import Arrival


def config(slots=2, memory=4, max_num_seqs=8, tokens=256, blocks=400, **more):
    return ReplicaConfig(
        SchedulerConfig(max_num_seqs, tokens),
        CacheConfig(num_blocks=blocks),
        LoRAConfig(max_loras=slots, max_cpu_loras=memory),
        **more,
    )


def fleet(replica=None, cost=None, ranks=(8,) * 6, replicas=1, route=least_loaded):
    """A step takes a second, unless told otherwise; adapters are there at once."""
    cost = cost or CostModel({"steps": 1.0}, copy_bytes_per_s=1e12, read_bytes_per_s=1e12)
    return Fleet(replica or config(), cost, adapters_of_ranks(ranks, 1e5), route, replicas)


class Scripted(Replica):
    """A replica that serves one request after the other, each in a step of `output_tokens` seconds.

    A request may run `prompt_tokens` seconds after it came.   log: of what it was told, and when
    """

    def __init__(self, real, log):
        vars(self).update(vars(real))
        self.log, self.waiting = log, []

    def add(self, arrival):
        self.log.append(("add", arrival.time_s, self.number))
        self.waiting.append(arrival)
        self._num_requests += 1
        self.served[str(self._num_requests)] = served = Served(arrival, self.number)
        return served

    def begin_step(self, now):
        self.log.append(("begin", now, self.number))
        ready = [one for one in self.waiting if one.time_s + one.prompt_tokens <= now]
        if not ready:
            return None
        self.output = ready[0]
        self.waiting.remove(ready[0])
        return ready[0].output_tokens

    @property
    def wakes_at(self):
        return min((one.time_s + one.prompt_tokens for one in self.waiting), default=None)

    def end_step(self, now):
        assert self.output is not None
        self.log.append(("end", now, self.number))
        came = self.output.time_s
        name = next(name for name, served in self.served.items() if served.arrival.time_s == came)
        self.output = None
        return [self.served.pop(name)]


def scripted(replicas=1, route=least_loaded):
    """A fleet of scripted replicas, and their common log."""
    made, log = fleet(replicas=replicas, route=route), []
    made.replicas = [Scripted(replica, log) for replica in made.replicas]
    return made, log


def arrivals_of(*each):
    """Of (time, seconds until it may run, seconds of its step)."""
    return [Arrival(time, until, step, None) for time, until, step in each]
