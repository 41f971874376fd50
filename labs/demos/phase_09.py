"""From a socket to the engine's thread and back."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models

from minivllm.engine.metrics import RequestMetrics
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.server.access_log import Record
from minivllm.server.keys import Holder
from minivllm.server.metrics import Progress, ServerMetrics
from minivllm.server.names import ModelNames
from minivllm.server.protocol import LoadAdapterRequest
from minivllm.server.settings import ServerSettings
from minivllm.serving.call_queue import CallQueue
from minivllm.serving.cancellation import listen
from minivllm.serving.streams import Stream, output_stream
from minivllm.sources.resolver import stable_id
from minivllm.text.detokenizer import IncrementalDetokenizer


def state(future: Future) -> str:
    if not future.done():
        return "waits"
    if future.cancelled():
        return "was cancelled"
    return str(future.exception() or future.result())


def demo_9_1() -> Iterator[str]:
    call_queue: CallQueue[list[str]] = CallQueue()
    engine: list[str] = []
    futures = {name: call_queue.call(lambda engine, name=name: engine.append(name)) for name in "abc"}
    futures["b"].cancel()
    yield f"before a step: a {state(futures['a'])}, b {state(futures['b'])}"
    call_queue.run(engine, wait=False)
    yield f"between two steps the engine's thread has run {engine}"
    call_queue.end(RuntimeError("the engine has ended"))
    yield f"a call after the end: {state(call_queue.call(lambda engine: None))}"


def demo_9_2() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    stream: Stream[str] = Stream(loop, lambda earlier, later: earlier + later)
    for text in ("Oslo", " is", " a city"):
        yield f"put {text!r}: wake the consumer? {'yes' if stream.put(text) else 'no'}"
    stream._ready.set()
    yield f"take: {loop.run_until_complete(stream.take())!r}"
    yield f"put '.': wake the consumer? {'yes' if stream.put('.') else 'no'}"
    loop.close()


def output(length: int, **options: object) -> RequestOutput:
    return RequestOutput(
        "r", None, [1, 2, 3], [CompletionOutput(0, "", [7] * length)], finished=False, **options
    )


def demo_9_3() -> Iterator[str]:
    told: list[str] = []
    client = SimpleNamespace(abort=lambda ids, sink: told.append("an abort is left for the engine"))

    async def begin() -> None:
        told.append("the request begins")

    async def leave_after_one() -> None:
        stream = output_stream(asyncio.get_running_loop(), "delta")
        stream.put(output(1))
        stream._ready.set()
        outputs = listen(client, stream, "r", begin)
        await anext(outputs)
        told.append("one token is there, and the client leaves")
        await outputs.aclose()

    asyncio.run(leave_after_one())
    yield from told


class NotedEngine:
    """It knows what it was given, and does nothing with it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.adapter_names: set[str] = set()

    async def add_lora(self, request: LoRARequest) -> bool:
        self.told.append(
            f"read {request.lora_name} from {request.lora_path}, in place: {request.load_inplace}"
        )
        self.adapter_names.add(request.lora_name)
        return True

    async def remove_lora(self, adapter_id: int) -> bool:
        self.told.append(f"remove {'sql' if adapter_id == stable_id('sql') else adapter_id}")
        return True


def demo_9_4() -> Iterator[str]:
    llm = NotedEngine()
    names = ModelNames(llm, ServerSettings("base"), lambda name: None)
    for folder, in_place in (("old", False), ("new", True)):
        order = LoadAdapterRequest(lora_name="sql", lora_path=folder, load_inplace=in_place)
        asyncio.run(names.load(order))
    found = asyncio.run(names.find("sql", Holder()))
    yield f"sql is in {found.lora_path}, to be read in place: {found.load_inplace}"
    yield f"a request of it tells the engine: {names.for_engine(found)}"
    asyncio.run(names.unload("sql"))
    yield f"after the unload these are served: {names.visible(Holder())}"
    yield from (f"the engine was told: {told}" for told in llm.told)


def demo_9_5() -> Iterator[str]:
    now = [10.0]
    metrics = ServerMetrics("base", ["sql"], most_labels=3)
    progress = Progress(metrics, Record(), "sql", clock=lambda: now[0])
    for seconds, length in ((1.0, 1), (0.5, 2), (3.0, 5)):
        now[0] += seconds
        progress.observe(output(length), all_are_seen=True)
        [family] = metrics.itl.collect()
        total, count = (
            next((s.value for s in family.samples if s.name.endswith(end)), 0) for end in ("_sum", "_count")
        )
        yield f"{length} tokens after {now[0] - 10:.1f} s: {count:.0f} times between tokens, {total:.2f} s in all"
    metrics.finished("sql", output(5, metrics=RequestMetrics(8.0, first_token_time=11.0)))
    yield f"time to the first token, from arrival: {list(metrics.recent_ttft)}"
    yield f"labels of sql, dates, json: {[metrics.label(name) for name in ('sql', 'dates', 'json')]}"


def tokenizer_of(vocabulary: dict[str, int]) -> SimpleNamespace:
    """A byte-level tokenizer of these tokens, each in the letters that stand for its bytes."""
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return SimpleNamespace(backend_tokenizer=backend)


def demo_9_6() -> Iterator[str]:
    vocabulary = {"Caf": 0, "Ã": 1, "©": 2, "ĠE": 3, "N": 4, "D": 5, "ding": 6}
    yield "tokens: 'Caf', half of 'é', its other half, ' E', 'N', and more; the stop string is 'END'"
    for title, ids in (("then 'ding'", (0, 1, 2, 3, 4, 6)), ("then 'D'", (0, 1, 2, 3, 4, 5))):
        detokenizer = IncrementalDetokenizer(
            tokenizer_of(vocabulary), SamplingParams(stop=["END"], max_tokens=9)
        )
        pieces = [detokenizer.update([token], finished=token == ids[-1]) for token in ids]
        yield f"{title}: {[piece for piece, _ in pieces]}, stopped by {pieces[-1][1]!r}"
