"""Logprobs of prompts: those of transformers + PEFT, with adapters on any layer, however the prompt is computed."""

import pytest
import torch

from minivllm import SamplingParams
from tests.tools.nights import without_gpu_at_night
from tests.worlds.engines import TinyWorld, crossed, greedy, run, tokens_of
from tests.worlds.models import character_tokenizer, token_ids
from tests.worlds.tokens import COUNTS, TokenSet, V

ADAPTERS = {
    "qv": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "head": {"r": 6, "lora_alpha": 12, "target_modules": ["lm_head"]},
    "both": {"r": 5, "lora_alpha": 9, "target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"]},
}
# Backend -> how far off logprobs may be: kernels compute in float32 whatever the dtype.
BACKENDS = {"loops": 1e-9, "grouped": 1e-9, "triton": 1e-4, "paged": 1e-4}
VARIANTS = ["llama-llama3-rope", "qwen2-tied"]
SETTINGS = {
    "at once": {},
    "in chunks of 5 tokens": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "in passes of 2 rows": {"max_num_seqs": 2},
    "one slot": {"max_loras": 1, "max_cpu_loras": 1},
    "few blocks": {"num_kv_blocks": 14, "max_num_batched_tokens": 24},
}
_sets = {}


@pytest.fixture
def llama(tmp_path_factory):
    return made("llama-llama3-rope", tmp_path_factory)


def made(variant, tmp_path_factory):
    if variant not in _sets:
        _sets[variant] = TinyWorld(tmp_path_factory.mktemp("prompts"), variant, ADAPTERS)
    return _sets[variant]


def assert_logprobs(output, world, name, wanted, tolerance=1e-9):
    """First None, then of each token its own logprob and the likeliest ones', with their ranks."""
    prompt = output.prompt_token_ids
    expected = world.oracle_of(name).logits(name, [prompt])[0, :-1].log_softmax(dim=-1)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for token, row, found in zip(prompt[1:], expected, output.prompt_logprobs[1:], strict=True):
        assert next(iter(found)) == token
        assert set(found) == {token, *row.topk(wanted).indices.tolist()}
        for other, logprob in found.items():
            assert logprob.logprob == pytest.approx(float(row[other]), abs=tolerance), name
            assert logprob.rank == 1 + int((row > row[other] + tolerance).sum())


@pytest.mark.parametrize(("variant", "setting"), crossed(VARIANTS, SETTINGS))
def test_are_those_of_each_request_alone(tmp_path_factory, variant, setting):
    world = made(variant, tmp_path_factory)
    engine = world.engine(**{"max_loras": 4, **SETTINGS[setting]})
    pairs = world.workload(rows=2)
    for number, (name, prompt) in enumerate(pairs):
        params = greedy(4, prompt_logprobs=number % 3, logprobs=1)
        engine.add_request(str(number), prompt, params, lora_request=world.request(name))
    engine.add_request("asks for none", [5, 6, 7], greedy(4))

    outputs = run(engine)

    assert outputs["asks for none"].prompt_logprobs is None
    for number, (name, prompt) in enumerate(pairs):
        assert tokens_of(outputs[str(number)]) == world.answer(name, prompt, 4)
        assert_logprobs(outputs[str(number)], world, name, wanted=number % 3)


@pytest.mark.parametrize("backend", without_gpu_at_night(["loops", "grouped", "triton"], "paged"))
def test_23_of_an_adapter_on_lm_head_are_its_own_on_every_backend(llama, backend):
    """As many rows of logits as prompt tokens need as many adapters: not one for each request."""
    engine = llama.engine(max_loras=4, punica_backend=backend)
    names = ["head", None, "both", "head", "qv"]
    for number, name in enumerate(names):
        params = greedy(2, prompt_logprobs=2)
        engine.add_request(str(number), token_ids(9 + number, 1), params, lora_request=llama.request(name))

    outputs = run(engine)

    for number, name in enumerate(names):
        assert_logprobs(outputs[str(number)], llama, name, wanted=2, tolerance=BACKENDS[backend])


def test_are_moved_by_the_adapter_on_lm_head(llama):
    """Agreement proves nothing of an adapter that changes nothing."""
    prompt = token_ids(12, 4)
    base, head = (llama.oracle_of(name).logits(name, [prompt])[0].log_softmax(-1) for name in (None, "head"))

    assert (base - head).abs().max() > 0.5


def test_of_a_prompt_whose_blocks_are_cached_are_computed_anew(llama):
    engine, prompt = llama.engine(), token_ids(18, 2)
    engine.add_request("first", prompt, greedy(3), lora_request=llama.request("head"))
    run(engine)
    for request_id, params in {"asks": greedy(3, prompt_logprobs=1), "does not": greedy(3)}.items():
        engine.add_request(request_id, prompt, params, lora_request=llama.request("head"))

    outputs = run(engine)

    assert outputs["does not"].num_cached_tokens == 16
    assert outputs["asks"].num_cached_tokens == 0
    assert_logprobs(outputs["asks"], llama, "head", wanted=1)


def test_survive_a_preemption_and_are_computed_once_in_passes_of_no_more_rows_than_a_step_may_have(
    llama, monkeypatch
):
    """The logits of a whole prompt over a large vocabulary are memory that nobody has counted."""
    options = {"num_kv_blocks": 12, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    engine = llama.engine(**options, enable_prefix_caching=False)
    rows, compute = [], engine.runner.model.compute_logits
    monkeypatch.setattr(engine.runner.model, "compute_logits", lambda h: rows.append(len(h)) or compute(h))
    for i in range(3):
        params = greedy(12, prompt_logprobs=1)
        engine.add_request(str(i), token_ids(12, i), params, lora_request=llama.request("head"))

    outputs = run(engine)

    assert engine.scheduler.num_preemptions > 0
    assert (sum(rows), max(rows)) == (3 * 11 + 3 * 12, 3)
    for i in range(3):
        assert_logprobs(outputs[str(i)], llama, "head", wanted=1)
        assert tokens_of(outputs[str(i)]) == llama.answer("head", token_ids(12, i), 12)


@pytest.mark.parametrize("prompt", [[5, 6, 7], [5]], ids=["three tokens", "one, of which they are None"])
def test_come_with_every_output_of_the_request(llama, prompt):
    engine = llama.engine()
    engine.add_request("a", prompt, greedy(3, prompt_logprobs=1))

    outputs = [output for _ in range(3) for output in engine.step()]

    assert [len(output.prompt_logprobs) for output in outputs] == [len(prompt)] * 3
    assert all(output.prompt_logprobs[0] is None for output in outputs)


def test_have_their_tokens_as_text(llama):
    engine = llama.engine(character_tokenizer())
    engine.add_request("a", "ab", greedy(2, prompt_logprobs=2))

    _, of_b = run(engine)["a"].prompt_logprobs

    assert next(iter(of_b.values())).decoded_token == "b"
    assert all(logprob.decoded_token is not None for logprob in of_b.values())


def test_of_tokens_that_an_adapter_only_reads_are_impossible(tmp_path_factory):
    world = TokenSet(tmp_path_factory.mktemp("read"), "llama-llama3-rope")
    engine = world.engine(lora_extra_vocab_size=4, target_modules=["embed_tokens", "q_proj", "v_proj"])
    engine.add_request("a", [5, V, 9], greedy(2, prompt_logprobs=1), lora_request=world.request("reads"))

    _, added, known = run(engine)["a"].prompt_logprobs

    assert COUNTS["reads"] == 1
    assert added[V].logprob == -torch.inf and added[V].rank == V + 1
    logits = world.oracle_of("reads").logits("reads", [[5, V, 9]])[0, 1]
    assert known[9].logprob == pytest.approx(float(logits.log_softmax(-1)[9]), abs=1e-9)


def test_are_bounded_by_the_engine(llama):
    engine = llama.engine(max_logprobs=20)

    with pytest.raises(ValueError, match="prompt_logprobs=21, but max_logprobs is 20"):
        engine.add_request("a", [5, 6], SamplingParams(prompt_logprobs=21))
