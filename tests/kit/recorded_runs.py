"""A program on the engine with some modules from elsewhere, each run in a process of its own."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from labs.kit.compare import Recorded, read
from labs.kit.overlay import Overlay, Source
from tests.tools.forked import SERVER

VARIANT = "mistral-one-kv-head"  # whose rotary tables need nothing of transformers: its import takes a second

# Prompts that begin alike, more adapters than slots, base requests between: all that a scheduler has to do happens.
PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from tests.worlds.engines import TinyWorld, greedy
from pathlib import Path

world = TinyWorld(Path({folder!r}), {variant!r})
engine = world.engine(max_num_batched_tokens=20, max_num_seqs=6, max_cpu_loras=3, max_lora_wait_steps=6)
a, b, c, d = world.names
shared = [5, 9, 11, 7, 3, 2, 8, 4]
for number, name in enumerate([a, None, b, a, c, None, d, b, c, a]):
    prompt = {{"prompt_token_ids": [*shared, 20 + number, 3, 30 - number]}}
    engine.add_request(f"r{{number}}", prompt, greedy(6 + number), lora_request=world.request(name))
    if number % 2:
        engine.step()
while engine.has_unfinished_requests():
    engine.step()
"""


# The same engine where it is, or in a process of its own, which is fresh: one request after the other.
ONE_BY_ONE = """
import sys
sys.path[:0] = {paths!r}
import asyncio
from functools import partial
from pathlib import Path
from minivllm import AsyncLLM
from minivllm.serving.engine_process import EngineProcess
from tests.worlds.engines import TinyWorld, greedy, make_engine

async def main(llm):
    for number, name in enumerate(world.names[:2]):
        await llm.add_lora(world.request(name))  # it is not read beside a number of idle steps
        async for output in llm.generate([5, 6, 7], greedy(4), f"r{{number}}", world.request(name)):
            pass

world = TinyWorld(Path({folder!r}), {variant!r})
far = partial(make_engine, world.base, None, {{}})
llm = AsyncLLM(EngineProcess(far)) if {in_a_process} else AsyncLLM.from_engine(world.engine())
asyncio.run(main(llm))
llm.shutdown()
"""

# Two engines in processes of their own; the second answers while the first has a request under way.
TWO_BESIDE = """
import sys
sys.path[:0] = {paths!r}
import asyncio
from functools import partial
from pathlib import Path
from minivllm import AsyncLLM
from minivllm.serving.engine_process import EngineProcess
from tests.worlds.engines import TinyWorld, greedy, make_engine

async def answer(llm, request_id, max_tokens):
    async for output in llm.generate([5, 6, 7], greedy(max_tokens), request_id):
        pass

async def main(first, *others):
    outputs = first.generate([5, 6, 7], greedy(30), "first")
    await anext(outputs)
    for number, other in enumerate(others):
        await answer(other, f"other{{number}}", 6)
    async for output in outputs:
        pass

world = TinyWorld(Path({folder!r}), {variant!r})
far = partial(make_engine, world.base, None, {{}})
llms = [AsyncLLM(EngineProcess(far)) for _ in range({number})]
asyncio.run(main(*llms))
for llm in llms:
    llm.shutdown()
"""


def write_program(path: Path, world: Path, program: str = PROGRAM, **options: object) -> Path:
    """The program, for a `TinyWorld` in a folder."""
    paths = [str(Path(__file__).resolve().parents[2])]
    path.write_text(program.format(paths=paths, folder=str(world), variant=VARIANT, **options))
    return path


def run_all(
    jobs: Mapping[str, Mapping[str, Source]], program: Path, folder: Path, at_once: int = 2
) -> dict[str, Recorded]:
    """Name -> what the engine did that has these modules from elsewhere."""
    waiting, running = list(jobs.items()), []
    while waiting or running:
        while waiting and len(running) < at_once:
            name, sources = waiting.pop(0)
            process = SERVER.Process(target=_run, args=(dict(sources), program, folder / f"{name}.jsonl"))
            process.start()
            running.append(process)
        running.pop(0).join()
    assert all((folder / f"{name}.jsonl").exists() for name in jobs), "a process ended before its program"
    return {name: read(name, folder / f"{name}.jsonl") for name in jobs}


def _run(sources: dict[str, Source], program: Path, file: Path) -> None:
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(silence, descriptor)
    Overlay(sources).install()
    loaded = [name for name in sources if name in sys.modules]
    assert not loaded, f"{loaded} were imported before they could come from elsewhere"
    import torch

    torch.set_num_threads(1)
    from labs.kit.recording import main

    main(str(file), "python", str(program))
