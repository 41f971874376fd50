"""Engine options and prompts that cannot be served: refused at the start, by name, in a short sentence."""

import math
from dataclasses import fields

import numpy as np
import pytest

from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.assembly import LORA_EXTENSIONS
from minivllm.sizing.slot_memory import refuse_slots_that_do_not_fit
from tests.worlds.engines import greedy, run, snapshot, tokens_of
from tests.worlds.models import character_tokenizer

PROMPT = [5, 6, 7, 8, 9]
INTS = [
    "max_model_len",
    "max_logprobs",
    "seed",
    "max_loras",
    "max_lora_rank",
    "max_cpu_loras",
    "lora_extra_vocab_size",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_lora_wait_steps",
    "tensor_parallel_size",
]
NUMBERS = ("gpu_memory_utilization",)
FLAGS = [
    "async_scheduling",
    "skip_tokenizer_init",
    "enforce_eager",
    "disable_custom_all_reduce",
    "batch_invariant",
    "refuse_pickles",
    "enable_lora",
    "fully_sharded_loras",
    "bias_enabled",
    "enable_lora_bias",
    "enable_dora",
    "enable_prefix_caching",
    "warm_up",
]
TEXTS = [
    *("dtype", "device", "load_format", "lora_dtype", "punica_backend"),
    *("eviction_policy", "scheduling_policy"),
]
MAY_BE_NONE = {
    "max_model_len",
    "max_loras",
    "max_cpu_loras",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
    "quantization",
}
NO_INTS = [1.5, "x", "5", True, math.nan, math.inf, -2, 10**400, [1], {}, 1j, None]


# Option -> values that are none of its. 10**400 is more than a tensor holds.
REFUSED = {
    **{name: [v for v in NO_INTS if v is not None or name not in MAY_BE_NONE] for name in (*INTS, *NUMBERS)},
    **dict.fromkeys(FLAGS, ("yes", 1, None, [])),
    **dict.fromkeys(TEXTS, ("no such thing", 5, None, [], b"auto")),
    "chat_template": [5, [], b"auto"],
    "target_modules": ["q_proj", [3], 5, []],
    "long_lora_scaling_factors": [[math.nan], "2.0", [10**400]],
    "quantization": [5, []],
    "threads": [0, -1, True, 1.5, "2"],
}
REFUSED["lora_extra_vocab_size"] = [*REFUSED["lora_extra_vocab_size"], -1, 2**63]


def test_every_option_is_tried():
    assert {field.name for field in fields(EngineArgs)} - {"model"} == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_of_no_use_is_refused_by_its_name(world, name):
    told = name.removeprefix("num_kv_").removeprefix("kv_cache_")
    for value in REFUSED[name]:
        args = EngineArgs(**{"model": str(world.base), "device": "cpu", "enable_lora": True, name: value})
        with pytest.raises(ValueError, match=told) as refusal:
            args.create_engine_config()
        assert len(str(refusal.value)) <= 500


def test_a_count_that_no_tensor_holds_is_told_how_large_it_may_be(world):
    args = EngineArgs(str(world.base), device="cpu", enable_lora=True, max_cpu_loras=2**63)

    with pytest.raises(ValueError, match=rf"max_cpu_loras must be at most {2**63 - 1}, got {2**63}"):
        args.create_engine_config()


def test_fewer_adapters_in_memory_than_slots_are_refused(world):
    args = EngineArgs(str(world.base), device="cpu", enable_lora=True, max_loras=4, max_cpu_loras=3)

    with pytest.raises(ValueError, match=r"max_cpu_loras \(3\) must be at least max_loras \(4\)"):
        args.create_engine_config()


@pytest.mark.parametrize("name", ["max_loras", "max_lora_rank", "lora_extra_vocab_size", "threads"])
def test_what_no_machine_holds_is_told_how_large_it_may_be(world, name):
    args = EngineArgs(**{"model": str(world.base), "device": "cpu", "enable_lora": True, name: 10**14})

    with pytest.raises(ValueError, match=rf"^{name} must be at most \d+, got {10**14}$"):
        args.create_engine_config()


def test_slots_of_the_largest_numbers_are_counted_and_refused(world):
    largest = {"max_loras": 10**6, "max_lora_rank": 2**20, "lora_extra_vocab_size": 2**20}
    args = EngineArgs(**{"model": str(world.base), "device": "cpu", "enable_lora": True, **largest})

    with pytest.raises(ValueError, match=r"LoRA slots need [\d,]+ bytes"):
        refuse_slots_that_do_not_fit(args.create_engine_config(), extensions=LORA_EXTENSIONS)


@pytest.mark.parametrize("model", [None, 5, "", "no/such/folder", b"x", ["a"], "a\0b", "x" * 10_000], ids=str)
def test_a_model_that_is_no_folder_is_refused(model):
    with pytest.raises((FileNotFoundError, ValueError), match="model"):
        EngineArgs(model=model).create_engine_config()


class TestText:
    @pytest.fixture
    def engine(self, world):
        return world.engine(character_tokenizer(), max_model_len=64)

    @pytest.mark.parametrize("text", ["a\ud800b", "\udcff", "\udfff\ud800"], ids=ascii)
    def test_that_is_none_is_refused(self, engine, text):
        before = snapshot(engine)

        with pytest.raises(
            ValueError, match=r"the prompt of request 'a' is no text: character \d is '\\ud"
        ) as refusal:
            engine.add_request("a", text, greedy())

        assert str(refusal.value).isprintable() and str(refusal.value).isascii()
        assert snapshot(engine) == before

    def test_that_is_longer_than_any_context_is_refused_unread(self, engine, monkeypatch):
        monkeypatch.setattr(engine.tokenizer, "_encode_plus", None)

        with pytest.raises(ValueError, match=r"'a' has 100000 characters, more than max_model_len 64 allows"):
            engine.add_request("a", "a" * 100_000, greedy())

    def test_that_just_fits_is_read(self, engine):
        engine.add_request("a", "a" * 60, greedy(2))

        assert len(run(engine)["a"].prompt_token_ids) == 60

    def test_that_the_tokenizer_stumbles_over_is_refused(self, world):
        class Stumbling:
            def __init__(self, tokenizer):
                self.tokenizer = tokenizer

            def __getattr__(self, name):
                return getattr(self.tokenizer, name)

            def __call__(self, text):
                raise PanicException("index out of bounds")

        class PanicException(BaseException):
            pass

        engine = world.engine(Stumbling(character_tokenizer()))

        with pytest.raises(
            ValueError, match=r"prompt of request 'a' cannot be read by its tokenizer.*out of bounds"
        ):
            engine.add_request("a", "abc", greedy())

    def test_of_a_conversation_is_checked_likewise(self, world):
        llm = world.llm(max_model_len=64)
        llm.llm_engine.tokenizer.chat_template = "{{ messages[0].content }}"

        with pytest.raises(ValueError, match=r"the conversation is no text: character 1 is '\\ud800'"):
            llm.chat([{"role": "user", "content": "a\ud800"}], greedy(2), use_tqdm=False)
        with pytest.raises(ValueError, match=r"the conversation has 100000 characters"):
            llm.chat([{"role": "user", "content": "a" * 100_000}], greedy(2), use_tqdm=False)


class TestNumbers:
    @pytest.mark.parametrize("temperature", [2**64, 1e300, np.float32(0.5)], ids=str)
    def test_of_any_kind_and_size_draw_a_token(self, world, temperature):
        engine = world.engine()
        engine.add_request(
            "hot", PROMPT, SamplingParams(temperature=temperature, max_tokens=5, ignore_eos=True)
        )
        engine.add_request("cool", PROMPT, greedy(5))

        outputs = run(engine)

        assert len(tokens_of(outputs["hot"])) == 5
        assert tokens_of(outputs["cool"]) == world.oracle().greedy(None, PROMPT, 5)

    def test_of_logprobs_are_bounded_by_the_engine(self, world):
        engine = world.engine(max_logprobs=20)

        with pytest.raises(ValueError, match="logprobs=21, but max_logprobs is 20"):
            engine.add_request("a", PROMPT, greedy(2, logprobs=21))

        engine.add_request("b", PROMPT, greedy(2, logprobs=20))
        assert len(run(engine)["b"].outputs[0].logprobs) == 2
        assert EngineArgs(str(world.base)).max_logprobs == 20

    def test_of_arrival_may_be_numpys(self, world):
        engine = world.engine()

        engine.add_request("a", PROMPT, greedy(1), arrival_time=np.float32(3))

        assert type(run(engine)["a"].metrics.arrival_time) is float


def test_enable_lora_bias_is_another_name_of_bias_enabled(world):
    configs = [
        EngineArgs(str(world.base), device="cpu", enable_lora=True, **{name: True}).create_engine_config()
        for name in ("enable_lora_bias", "bias_enabled")
    ]

    assert [config.lora_config.bias_enabled for config in configs] == [True, True]
    assert not EngineArgs(str(world.base), enable_lora=True).create_engine_config().lora_config.bias_enabled


@pytest.mark.parametrize(
    ("option", "said"),
    [("max_lora", r"'max_lora' \(nearest: max_loras, "), ("frobnicate", "'frobnicate'; EngineArgs has all")],
)
def test_an_option_that_there_is_not_is_refused_with_the_nearest(option, said):
    with pytest.raises(TypeError, match=said):
        LLM("nowhere", **{option: 2})
