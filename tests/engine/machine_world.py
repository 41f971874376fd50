"""What `engine_machine.py` is made of: requests and options that are drawn, adapters on disk, right answers, faults."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hypothesis.strategies as st

from minivllm import LLMEngine, LoRARequest, RequestOutput, SamplingParams
from minivllm.config import EVICTION_POLICIES, SCHEDULING_POLICIES
from minivllm.engine.outputs import CompletionOutput
from tests.worlds.models import character_tokenizer
from tests.worlds.small import USUAL, SmallWorld, Tensors, write_adapter

NUM_ADAPTERS = 5  # ids 1 to 5; id 0 is the base model
LONGEST_PROMPT, MOST_TOKENS, MOST_ANSWERS = 20, 10, 3
VOCABULARY = 97  # of the character tokenizer

# What may lie in an adapter's folder. NaN is found when the adapter is read, the other faults when it is named.
GOOD = ("v0", "v1", "v2")
BAD_AT_FIRST_SIGHT = ("missing", "wrong-shape")
BAD = (*BAD_AT_FIRST_SIGHT, "nan")

# Every prompt is the beginning of one of two texts, so that requests find each other's blocks in the prefix cache.
TEXTS = [[3 + k * step % (VOCABULARY - 3) for k in range(LONGEST_PROMPT)] for step in (7, 31)]
ENDS: dict[str, dict[str, Any]] = {
    "": {},
    "only length": {"ignore_eos": True},
    "strings": {"stop": list("abcdefghijkl"), "min_tokens": 1},
    "ids": {"stop_token_ids": list(range(20, 35))},
}
# What the engine computes beside tokens, and has to keep through preemptions and steps that are broken off.
EXTRAS: dict[str, dict[str, Any]] = {
    "": {},
    "logprobs": {"logprobs": 1},
    "prompt logprobs": {"prompt_logprobs": 0},
    "penalty": {"repetition_penalty": 1.4, "logprobs": 2},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": {7: 2.0, 20: -3.0}},
}


# ---- what is drawn ------------------------------------------------------------------------------------------------


class Ask(NamedTuple):
    """A request, but for its adapter.

    seed    of `n` answers; None is one answer of the likeliest tokens
    ends    what ends an answer early, a key of ENDS
    extra   a key of EXTRAS
    """

    text: int
    length: int
    max_tokens: int
    seed: int | None
    n: int
    ends: str
    extra: str

    @property
    def prompt(self) -> list[int]:
        return TEXTS[self.text][: self.length]

    @property
    def params(self) -> SamplingParams:
        drawn = (
            {"temperature": 0} if self.seed is None else {"temperature": 1.2, "seed": self.seed, "n": self.n}
        )
        return SamplingParams(max_tokens=self.max_tokens, **drawn, **ENDS[self.ends], **EXTRAS[self.extra])


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Greedy, or seeded and for several answers; the prompt is shorter or longer than a block."""
    seed = draw(st.sampled_from([None, None, 0, 1]))
    return Ask(
        draw(st.integers(0, len(TEXTS) - 1)),
        draw(st.integers(1, LONGEST_PROMPT)),
        draw(st.integers(1, MOST_TOKENS)),
        seed,
        1 if seed is None else draw(st.integers(1, MOST_ANSWERS)),
        draw(st.sampled_from(list(ENDS))),
        draw(st.sampled_from(list(EXTRAS))),
    )


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, Any]:
    """Of engines in which everything is scarce: slots, memory for adapters, KV blocks, tokens in a step."""
    max_loras, block_size = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 8]))
    blocks_of_a_request = -(-(LONGEST_PROMPT + MOST_TOKENS) // block_size)
    return {
        "max_loras": max_loras,
        "max_cpu_loras": max_loras + draw(st.integers(0, 2)),
        "max_lora_wait_steps": draw(st.sampled_from([2, 6, 96])),
        "block_size": block_size,
        "num_kv_blocks": 1 + blocks_of_a_request * draw(st.integers(1, 4)),
        "enable_prefix_caching": draw(st.booleans()),
        "max_num_seqs": draw(st.sampled_from([2, 4, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([8, 16, 64])),
        "scheduling_policy": draw(st.sampled_from(SCHEDULING_POLICIES)),
        "eviction_policy": draw(st.sampled_from(EVICTION_POLICIES)),
        "punica_backend": draw(st.sampled_from(["loops", "grouped"])),
    }


# ---- what is on disk, and the right answers -----------------------------------------------------------------------


class Disk(SmallWorld):
    """A base model, and a folder for each version of each adapter. Versions differ in weights, rank and modules."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, vocab_size=VOCABULARY)
        self.tokenizer = character_tokenizer()
        self.answers: dict[tuple, RequestOutput] = {}
        for adapter_id in range(1, NUM_ADAPTERS + 1):
            (folder / f"adapter{adapter_id}").mkdir()
            for number, version in enumerate((*GOOD, "nan", "wrong-shape")):
                seed = 10 * adapter_id + number
                modules = USUAL[seed % 2 :]
                factor = float("nan") if version == "nan" else 1.0
                change = without_an_input if version == "wrong-shape" else dict
                options = {"factor": factor, "rank": 1 + seed % 6, "modules": modules, "change": change}
                write_adapter(self.path(adapter_id, version), seed, **options)

    def path(self, adapter_id: int, version: str) -> Path:
        return self.folder / f"adapter{adapter_id}" / version

    def answer(self, ask: Ask, adapter_id: int, version: str) -> RequestOutput:
        """The last output of an engine that was made for this request and has no other."""
        key = ask, adapter_id, version
        if key not in self.answers:
            engine = self.engine(self.tokenizer, max_loras=1, max_cpu_loras=1, enable_prefix_caching=False)
            lora = LoRARequest("alone", 1, str(self.path(adapter_id, version))) if adapter_id else None
            engine.add_request("alone", ask.prompt, ask.params, lora_request=lora)
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            assert outputs[-1].error is None, outputs[-1].error
            self.answers[key] = outputs[-1]
        return self.answers[key]


@cache
def disk() -> Disk:
    """One for all machines of a process."""
    folder = tempfile.TemporaryDirectory(prefix="engine-machine-")
    made = Disk(Path(folder.name))
    made.removed_with_it = folder
    return made


def version_of(lora: LoRARequest) -> str:
    """Of the folder that its path leads to now, also through a link."""
    return Path(lora.lora_path).resolve().name


def check_completion(ours: CompletionOutput, expected: CompletionOutput) -> None:
    """What there is of an answer so far, or all of it.   expected: the whole answer"""
    tokens = ours.token_ids
    assert tokens == expected.token_ids[: len(tokens)], f"tokens {tokens}, but alone {expected.token_ids}"
    if ours.logprobs is not None:
        check_logprobs(ours.logprobs, expected.logprobs[: len(tokens)])
    if ours.finish_reason == "error":
        return
    assert expected.text.startswith(ours.text), f"text {ours.text!r}, but alone {expected.text!r}"
    if ours.finish_reason is None:
        assert not tokens or len(tokens) < len(expected.token_ids), "it should have ended"
    else:
        ends = [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in (ours, expected)]
        assert ends[0] == ends[1], f"{ends[0]}, but alone {ends[1]}"


def check_logprobs(ours: list | None, expected: list | None) -> None:
    """Of each token, or of each token of a prompt."""
    assert (ours is None) == (expected is None)
    for mine, its in zip(ours or (), expected or (), strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            assert mine.keys() == its.keys()
            assert all(abs(mine[token].logprob - its[token].logprob) < 1e-9 for token in mine)


# ---- errors from inside -------------------------------------------------------------------------------------------


class Firing(NamedTuple):
    """An error that was thrown.

    call      the number of the engine call that it was thrown into
    version   of the adapter, where one was being read
    """

    point: str
    call: int
    adapter_id: int = 0
    version: str = ""


class Faults:
    """Errors thrown into an engine, at points that every step or every load of an adapter comes through.

    calls   of the engine so far
    fired   all errors that were thrown
    """

    IN_PASSES = ("compute_logits", "sample_tokens")
    WITH_ADAPTERS = ("_read", "write")
    POINTS = (*IN_PASSES, *WITH_ADAPTERS)

    def __init__(self, engine: LLMEngine, patches: ExitStack) -> None:
        self.calls = 0
        self.fired: list[Firing] = []
        self.is_in_a_call = False
        self.point, self.error = "", RuntimeError
        self.skip = self.left = 0
        worker = engine.adapters.worker
        owners = (engine.runner.model, engine.runner, worker.source, worker.manager.wrapped)
        for owner, name in zip(owners, self.POINTS, strict=True):
            patches.enter_context(mock.patch.object(owner, name, self._watched(name, getattr(owner, name))))

    def arm(self, point: str, error: type[Exception], skip: int, times: int) -> None:
        """Throw the error the next `times` times that the engine comes to the point, but for the first `skip`."""
        self.point, self.error, self.skip, self.left = point, error, skip, times

    def now(self, points: tuple[str, ...] = POINTS) -> list[Firing]:
        """What was thrown into the latest call, at any of these points."""
        return [firing for firing in self.fired if firing.call == self.calls and firing.point in points]

    def raised_now(self, error: object) -> bool:
        """Whether an error, or the text of one, was thrown into the latest call."""
        return was_thrown(error) and bool(self.now())

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around each call of the engine. Nothing is thrown outside, where engines of the oracle load adapters."""
        self.calls += 1
        self.is_in_a_call = True
        try:
            yield
        finally:
            self.is_in_a_call = False

    def _watched(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.is_in_a_call and self.left and self.point == point:
                if self.skip:
                    self.skip -= 1
                else:
                    self.left -= 1
                    self.fired.append(Firing(point, self.calls, *_adapter_at(point, args)))
                    raise self.error(f"thrown into {point}")
            return function(*args, **options)

        return call


def _adapter_at(point: str, args: tuple) -> tuple[Any, ...]:
    """The id of the adapter that a call is about, and its version where that is known."""
    if point == "_read":
        folder = Path(args[1]).resolve()
        return int(folder.parent.name.removeprefix("adapter")), folder.name
    return (args[0].id,) if point == "write" else ()


def was_thrown(error: object) -> bool:
    return "thrown into" in str(error)


def without_an_input(tensors: Tensors) -> Tensors:
    """Every A made for a module that is narrower by one."""
    return {name: t[:, :-1].contiguous() if ".lora_A." in name else t for name, t in tensors.items()}
