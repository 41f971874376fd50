"""A fleet without Ray: its engines are threads of this process, and its server listens on a port of its own."""

import pickle
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from itertools import cycle
from typing import Any

from deploy.fleet.fleet_llm import FleetLLM
from deploy.fleet.replica import Replica
from minivllm.server.app import FLEET_ROUTES, build_app
from minivllm.server.run import ServerThread
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM
from tests.worlds.engines import TinyWorld
from tests.worlds.servers import BASE_NAME, served, tokenizer_with_template


class LocalEngines:
    """`Engines` that are asked in turns; what goes to them and back is copied, as between processes.

    deaf        numbers of those that orders to all do not reach
    num_given   id of a request -> how many items of it have come, each of which was taken by whoever asked
    """

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.num_given: Counter[str] = Counter()
        self.deaf: set[int] = set()
        self._turns = cycle(replicas)

    async def generate(self, adapter: str | None, *args: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(next(self._turns).generate(*copied(args))) as items:
            async for item in items:
                yield copied(item)
                self.num_given[args[2]] += 1

    async def one(self, method: str, *args: Any) -> Any:
        result = copied(await next(self._turns).ask(method, *copied(args)))
        if isinstance(result, Exception):
            raise result
        return result

    async def all(self, method: str, *args: Any) -> list[Any]:
        hearing = [each for number, each in enumerate(self.replicas) if number not in self.deaf]
        return [copied(await each.ask(method, *copied(args))) for each in hearing]


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@contextmanager
def fleet(
    world: TinyWorld, *names: str, engine: dict | None = None, **settings: object
) -> Iterator[tuple[ServerThread, LocalEngines]]:
    """A server of these adapters in front of two engines; `engine` are the options of each."""
    made = ServerSettings(BASE_NAME, adapters=served(world, *names), **settings)
    llms = [AsyncLLM.from_engine(world.engine(tokenizer_with_template(), **engine or {})) for _ in range(2)]
    engines = LocalEngines([Replica(llm) for llm in llms])
    front = FleetLLM(engines, llms[0].config, llms[0].tokenizer)
    try:
        with ServerThread(build_app(front, made, FLEET_ROUTES), made) as server:
            yield server, engines
    finally:
        for llm in (front, *llms):
            llm.shutdown()
