"""A server under everything that clients do to it, for as long as one likes.

    python tests/server/server_soak.py --requests 10000 --seed 0

64 clients ask 40 adapters that share 4 slots. Some read slowly, some hang up at any byte; adapters are loaded, read
again with other weights, unloaded and pinned; some are bad. In the middle of every round the server is told to end,
and the next round begins with a new one. Every answer that is whole must be PEFT's; every request that is not answered
must have an error; when a round is over nothing may be left of it.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from server_soak_world import MOST_TOKENS, PROMPTS, SoakWorld

from minivllm.sources.resolver import FilesystemResolver, LoRAResolverRegistry
from tests.worlds.servers import BASE_NAME, serving
from tests.worlds.waiting import PATIENCE, wait_until

ENGINE = {"max_loras": 4, "max_cpu_loras": 12, "max_num_seqs": 24, "num_kv_blocks": 400}
HTTP = (
    "POST {path} HTTP/1.0\r\nhost: soak\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
)
# What a client does -> how often.
DEEDS = {"whole": 30, "stream": 30, "slow": 3, "hang up": 12, "bad": 8, "change": 10, "look": 4, "several": 6}
CHANGES = ("load", "reload", "second", "unload", "pin", "unpin", "load bad")
MOST_GROWTH = 150 * 2**20  # of memory, after the first round


class Round:
    """One server, from its start to its end. counts: what happened."""

    def __init__(
        self, world: SoakWorld, clients: int, requests: int, seed: str, counts: Counter, in_a_process: bool
    ) -> None:
        self.world, self.clients, self.left, self.counts = world, clients, requests, counts
        self.in_a_process = in_a_process
        self.rng = random.Random(seed)
        self.end_at = requests // 10  # so many are asked of a server that is about to end
        self.is_ending = False

    def run(self) -> None:
        known = self.world.names[: len(self.world.names) // 4]
        root = str(self.world.root)
        LoRAResolverRegistry.register_resolver("soak", FilesystemResolver(root, [str(self.world.base)]))
        seconds = {"drain_seconds": PATIENCE, "write_seconds": PATIENCE}  # every client reads on
        limits = {"max_concurrency": 4 * self.clients, **seconds}
        options = {"engine": ENGINE, "in_a_process": self.in_a_process, "lora_root": root, **limits}
        try:
            with serving(self.world, *known, allow_runtime_lora=True, **options) as server:
                self.server, self.address = server, server.socket.getsockname()
                asyncio.run(self.talk())
                server._thread.join(PATIENCE)
                assert not server._thread.is_alive(), "the server did not end"
                self.check_nothing_is_left(server.server.state.llm)
        finally:
            LoRAResolverRegistry.resolvers.pop("soak")

    async def talk(self) -> None:
        await asyncio.gather(*(self.client(random.Random(self.rng.random())) for _ in range(self.clients)))

    async def client(self, rng: random.Random) -> None:
        while self.left > 0:
            self.left -= 1
            if self.left <= self.end_at and not self.is_ending:
                self.is_ending = True
                self.server.server.drain()
            deed = rng.choices(list(DEEDS), DEEDS.values())[0]
            self.counts[deed] += 1
            try:
                await getattr(self, deed.replace(" ", "_"))(rng)
            except ConnectionError:
                assert self.is_ending, "the server closed a connection"
                self.counts["refused at the end"] += 1

    # ---- what a client does ---------------------------------------------------------------------------------

    def body(self, rng: random.Random, **changes: object) -> dict:
        name = rng.choice([BASE_NAME, *self.world.names])
        asked = {"model": name, "prompt": rng.choice(PROMPTS), "max_tokens": MOST_TOKENS, "temperature": 0}
        return {**asked, "ignore_eos": True, **changes}

    async def whole(self, rng: random.Random) -> None:
        body = self.body(rng)
        status, content = await self.ask("/v1/completions", body)
        if self.is_answered(status, content):
            self.check(body, [choice["text"] for choice in json.loads(content)["choices"]])

    async def several(self, rng: random.Random) -> None:
        body = self.body(rng, prompt=list(PROMPTS), stream=rng.random() < 0.5)
        status, content = await self.ask("/v1/completions", body)
        if self.is_answered(status, content):
            texts = (
                streamed(content) if body["stream"] else [c["text"] for c in json.loads(content)["choices"]]
            )
            self.check(body, texts)

    async def stream(self, rng: random.Random, pause: float = 0.0) -> None:
        body = self.body(rng, stream=True)
        status, content = await self.ask("/v1/completions", body, pause=pause)
        if self.is_answered(status, content):
            self.check(body, streamed(content))

    async def slow(self, rng: random.Random) -> None:
        await self.stream(rng, pause=0.02)

    async def hang_up(self, rng: random.Random) -> None:
        """In the middle of what is sent, or of what is read."""
        if rng.random() < 0.3:
            await self.ask("/v1/completions", self.body(rng), send_at_most=rng.randrange(200))
        else:
            body = self.body(rng, stream=rng.random() < 0.7)
            await self.ask("/v1/completions", body, read_at_most=rng.randrange(2000))

    async def bad(self, rng: random.Random) -> None:
        changes = [
            {"model": rng.choice(self.world.bad)},
            {"max_tokens": 0},
            {"nonsense": 1},
            {"prompt": [500]},
        ]
        status, _ = await self.ask("/v1/completions", self.body(rng, **rng.choice(changes)))
        assert status in (400, 404, 409) or self.is_over(status), status  # 409: its adapter is being unloaded

    async def look(self, rng: random.Random) -> None:
        path = rng.choice(["/v1/adapters", "/v1/models", "/metrics", "/health"])
        status, _ = await self.ask(path, None)
        assert status == 200 or self.is_over(status), (path, status)

    async def change(self, rng: random.Random) -> None:
        what, name = rng.choice(CHANGES), rng.choice(self.world.names)
        path = {"second": f"{name}-second", "load bad": rng.choice(self.world.bad)}.get(what, name)
        route = what if what in ("unload", "pin", "unpin") else "load"
        # One name may keep a slot: the others have to share what is left.
        body = {"lora_name": self.world.names[0] if "pin" in what else name}
        if route == "load":
            body |= {"lora_path": path, "load_inplace": what in ("reload", "second")}
        status, content = await self.ask(f"/v1/{route}_lora_adapter", body)
        self.counts[f"{what}: {status}"] += 1
        expected = (400, 404) if what == "load bad" else (200, 400, 404, 409)
        assert status in expected or self.is_over(status), (what, status, content)

    # ---- what comes back ------------------------------------------------------------------------------------

    async def ask(
        self,
        path: str,
        body: dict | None,
        send_at_most: int | None = None,
        read_at_most: int | None = None,
        pause: float = 0.0,
    ) -> tuple[int, bytes]:
        """Status and body of the answer; 0 for a client that has hung up."""
        content = b"" if body is None else json.dumps(body).encode()
        head = HTTP.format(path=path, length=len(content))
        sent = (head if body is not None else head.replace("POST", "GET")).encode() + content
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            writer.write(sent[:send_at_most])
            await writer.drain()
            answer = bytearray()
            while (read_at_most is None or len(answer) < read_at_most) and send_at_most is None:
                piece = await asyncio.wait_for(reader.read(200 if pause else 65536), PATIENCE)
                if not piece:
                    break
                answer += piece
                if pause:
                    await asyncio.sleep(pause)
        finally:
            writer.close()
        if send_at_most is not None or read_at_most is not None:
            return 0, b""
        if not answer:
            raise ConnectionResetError("no answer")
        head, _, rest = bytes(answer).partition(b"\r\n\r\n")
        return int(head.split()[1]), rest

    def is_over(self, status: int) -> bool:
        return status == 503 and self.is_ending

    def is_answered(self, status: int, content: bytes) -> bool:
        """Whether there is an answer to check; what is refused must say why."""
        self.counts[status] += 1
        if status == 200 and b'"error"' not in content:
            return True
        if status == 200:
            assert self.is_ending and b'"code":503' in content, content[-500:]
            return False
        error = json.loads(content)["error"]
        # Its adapter was there when its name was looked up, and is unloaded meanwhile.
        words = {404: "does not exist; there are:", 409: "being unloaded"}
        is_leaving = status in words and words[status] in error["message"]
        assert is_leaving or self.is_over(status), (status, error)
        return False

    def check(self, body: dict, texts: list[str]) -> None:
        """Each text is that of one version of its adapter's weights."""
        name = None if body["model"] == BASE_NAME else body["model"]
        prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        assert len(texts) == len(prompts)
        for prompt, text in zip(prompts, texts):
            assert text in self.world.texts[name, prompt], (name, prompt, text)
        self.counts["answers that are PEFT's"] += len(texts)

    def check_nothing_is_left(self, llm: object) -> None:
        assert not llm._open
        if self.in_a_process:
            client = llm._client
            assert client._process.returncode == 0, "the engine's process did not end by itself"
            assert not client._requests and not client._calls
            return
        engine = llm._client.engine
        assert not engine.scheduler.requests and not engine.output_processor.states
        assert not any(engine.scheduler.kv_cache.block_pool.ref_cnt[1:]), "KV blocks are left"
        assert not engine.adapters.noted or not engine.scheduler.in_flight.get(1)


def streamed(content: bytes) -> list[str]:
    """The texts of a stream that is whole."""
    *events, done = [event.removeprefix(b"data: ") for event in content.split(b"\n\n") if event]
    assert done == b"[DONE]", content[-200:]
    texts: dict[int, str] = {}
    for event in events:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


def memory() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_soak(
    requests: int,
    seed: int = 0,
    adapters: int = 40,
    clients: int = 64,
    rounds: int = 4,
    in_a_process: bool = True,
    most_growth: float = math.inf,
    progress: Callable[[int, Counter], None] | None = None,
) -> Counter:
    """AssertionError tells what went wrong, and in which round.

    most_growth   bytes of this process's memory, after the first round
    """
    counts: Counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        world = SoakWorld(Path(folder), adapters)
        after_first = 0
        for number in range(rounds):
            before = threading.active_count(), len(os.listdir("/proc/self/fd"))
            Round(world, clients, requests // rounds, f"{seed}/{number}", counts, in_a_process).run()
            gc.collect()
            # Threads and sockets end a little later; Python keeps a pool of threads for a loop.
            wait_until(lambda before=before: threading.active_count() <= before[0] + 2)
            wait_until(lambda before=before: len(os.listdir("/proc/self/fd")) <= before[1] + 8)
            after_first = after_first or memory()
            assert memory() < after_first + most_growth, f"round {number}: memory grows to {memory():,} bytes"
            if progress is not None:
                progress(number, counts)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapters", type=int, default=40)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--in-a-thread", dest="in_a_process", action="store_false")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.monotonic()

    def say(number: int, counts: Counter) -> None:
        seconds = time.monotonic() - started
        print(
            f"round {number + 1} of {options.rounds}, {seconds:.0f} s: {memory() / 2**20:.0f} MB", flush=True
        )

    counts = run_soak(**vars(options), most_growth=MOST_GROWTH, progress=say)
    print(json.dumps({str(what): count for what, count in counts.items()}, indent=2))


if __name__ == "__main__":
    main()
