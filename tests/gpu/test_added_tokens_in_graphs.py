"""Adapters that add tokens, and adapters with a bias on B, in captured decode steps and from a GPU's slot writer.

A step with adapters has V + X columns of logits, one without has V: two graphs. Without a GPU a "captured" step just
runs again, through Triton's interpreter, on the buffers it was made for.
"""

import pytest

from minivllm import SamplingParams
from minivllm.gpu.slot_writer import SlotWriter
from tests.tools.device import DEVICE, needs_cuda
from tests.tools.nights import without_gpu_at_night
from tests.worlds.engines import TinyWorld, greedy, run, tokens_of
from tests.worlds.gpu import compare_with_eager, graph_steps, watch_replays
from tests.worlds.tokens import COUNTS, TokenSet, V, with_new

EXTRA = 5
BIASES = {
    "bias": {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj", "o_proj"], "lora_bias": True},
    "plain": {"r": 8, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj", "up_proj"]},
    "all": {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "lora_bias": True},
}


def captured(world, backend="auto", **options):
    options = {"dtype": "float32", "max_num_seqs": 8, "max_cpu_loras": 6, "device": DEVICE, **options}
    engine = world.engine(punica_backend=backend, **options)
    graph_steps(engine.runner, mixed=False)
    watch_replays(engine)
    if DEVICE == "cpu":
        manager = engine.adapters.manager
        manager.slot_writer = SlotWriter(manager.wrapped, "cpu")
    return engine


# The interpreter takes its time, and what is tied is a matter of what is read, not of graphs.
@pytest.fixture(scope="module", params=["llama-llama3-rope", pytest.param("qwen2-tied", marks=needs_cuda)])
def tokens(request, tmp_path_factory):
    return TokenSet(tmp_path_factory.mktemp("tokens"), request.param)


@pytest.fixture(scope="module")
def biases(tmp_path_factory):
    return TinyWorld(tmp_path_factory.mktemp("biases"), "llama-linear-rope-biases-tied", BIASES)


def ask(engine, world, pairs, max_tokens=6):
    """Answers of one batch, every request of another length."""
    for i, (name, prompt) in enumerate(pairs):
        engine.add_request(str(i), prompt, greedy(max_tokens + i % 3), lora_request=world.request(name))
    outputs = run(engine)
    return [tokens_of(outputs[str(i)]) for i in range(len(pairs))]


def assert_right(world, pairs, answers, max_tokens=6):
    for i, ((name, prompt), answer) in enumerate(zip(pairs, answers, strict=True)):
        assert answer == world.answer(name, prompt, max_tokens + i % 3), f"{i}: {name}"


@pytest.mark.parametrize("backend", without_gpu_at_night(["auto"], "triton"))
@pytest.mark.nightly_without_gpu
def test_tokens_that_adapters_add_are_written_and_read_in_captured_steps(tokens, backend):
    engine = captured(tokens, backend, max_loras=2, lora_extra_vocab_size=EXTRA)
    names = ["cats", None, "dogs", "wide ends", "reads", "plain", "narrow ends"]
    pairs = [
        (name, with_new([5, 9, 7, 3 + i], COUNTS[name], i) if COUNTS.get(name) else [5, 9, 7, 3 + i])
        for i, name in enumerate(names)
    ]

    answers = ask(engine, tokens, pairs)

    assert_right(tokens, pairs, answers)
    assert any(token >= V for answer in answers for token in answer[:-1])
    assert sum(with_lora > 0 for _, with_lora in engine.replayed) > 5, "hardly any step was replayed"


@pytest.mark.nightly_without_gpu
def test_steps_with_adapters_and_without_take_turns(tokens):
    """The logits of one are wider than the other's."""
    engine = captured(tokens, max_loras=1, lora_extra_vocab_size=EXTRA)
    compare_with_eager(engine, tolerance=1e-4)

    for name in ["dogs", None, "plain", "cats", None, "plain"]:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
        engine.add_request("a", [5, 9, 7], params, lora_request=tokens.request(name))
        assert tokens_of(run(engine)["a"]) == tokens.answer(name, [5, 9, 7], 4), name

    assert {bool(with_lora) for _, with_lora in engine.replayed} == {True, False}


@pytest.mark.nightly_without_gpu
def test_a_seed_draws_alike_in_captured_steps_beside_added_tokens(tokens):
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    engine = captured(tokens, max_loras=2, lora_extra_vocab_size=EXTRA)

    drawn = []
    for beside in (None, "dogs"):
        engine.add_request("base", [5, 9], SamplingParams(**params))
        engine.add_request("other", [5, 9], SamplingParams(**params), lora_request=tokens.request(beside))
        drawn.append(tokens_of(run(engine)["base"]))

    assert drawn[0] == drawn[1]
    assert max(drawn[0]) < V


@pytest.mark.nightly_without_gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_biases_are_added_in_captured_steps(biases, backend):
    engine = captured(biases, backend, max_loras=2, bias_enabled=True)
    pairs = [(name, [5, 9, 7, 3 + i]) for i, name in enumerate(["bias", None, "plain", "all", "bias"])]

    answers = ask(engine, biases, pairs)

    assert_right(biases, pairs, answers)
    assert sum(with_lora > 0 for _, with_lora in engine.replayed) > 5
