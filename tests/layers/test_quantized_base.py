"""A base model in int8 with adapters in full on top: what transformers, torchao and PEFT make of the same weights."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from minivllm import LLM, EngineArgs, LLMEngine, LoRARequest
from minivllm.cli import app
from minivllm.layers.linear import LinearBase
from minivllm.models.registry import get_model
from tests.oracles.peft import (
    load_oracle,
    quantization_config,
    quantized_names,
    quantized_oracle,
    stored_bytes,
)
from tests.tools.device import interpreted
from tests.worlds.demo import NAMES, adapter_folder, demo_base, task_prompts
from tests.worlds.engines import OPTIONS, greedy, run, tiny_world, tokens_of
from tests.worlds.models import VARIANTS, PagedRequests, token_ids, transformers_model

NUM_TOKENS = 8
LENGTHS = [23, 9, 1, 34]
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(scope="module", params=["llama-linear-rope-biases-tied", "mixtral"])
def models(request, tmp_path_factory):
    """Plain and quantized."""
    folder = tmp_path_factory.mktemp(request.param)
    transformers_model(request.param).save_pretrained(folder)
    plain = get_model(folder, torch.float32, pack=False)
    return plain, get_model(folder, torch.float32, quantization="torchao")


class TestWeights:
    def test_are_whole_steps_of_each_row_none_farther_than_half_a_step_from_the_plain_one(self, models):
        plain, quantized = models
        weights = dict(plain.named_parameters())

        for name in quantized_names(quantized):
            weight = weights[name].double()
            step = weight.abs().amax(dim=1, keepdim=True) / 127.5  # (N, 1)
            steps = quantized.get_parameter(name).dequantize().double() / step
            assert (steps - steps.round()).abs().max() < 1e-4, name
            assert steps.round().min() >= -128, name
            assert steps.round().max() <= 127, name
            assert (steps - weight / step).abs().max() < 0.5001, name

    def test_are_the_linears_of_the_blocks_and_nothing_else(self, models):
        _, quantized = models

        linears = {
            f"{name}.weight" for name, module in quantized.named_modules() if isinstance(module, LinearBase)
        }
        kept = {name for name in linears if name.endswith(("lm_head.weight", "mlp.gate.weight"))}

        assert quantized_names(quantized) == linears - kept
        assert len(kept) == (3 if "Mixtral" in type(quantized).__name__ else 1)

    def test_take_a_quarter_of_their_bytes(self, models):
        plain, quantized = models
        names = quantized_names(quantized)

        before = sum(plain.get_parameter(name).nbytes for name in names)
        now = sum(stored_bytes(quantized.get_parameter(name)) for name in names)

        # A scale and a zero, 5 bytes a row, weigh more the shorter rows are; here they are 48 and 80 long.
        assert 0.25 * before < now < 0.28 * before

    def test_give_another_product_than_plain_ones_about_as_far_off_as_their_steps_are_wide(self, models):
        plain, quantized = models
        generator = torch.Generator().manual_seed(1)

        for name in sorted(quantized_names(quantized)):
            path = name.removesuffix(".weight")
            linear = plain.get_submodule(path)
            x = torch.randn(7, linear.input_size, generator=generator)
            exact = x.double() @ linear.weight.double().T
            if linear.bias is not None:
                exact += linear.bias.double()
            assert relative_error(linear(x)[0], exact) < 1e-6
            assert 0.002 < relative_error(quantized.get_submodule(path)(x)[0], exact) < 0.02


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_model_gives_the_logits_of_transformers_quantized_alike(variant, tmp_path):
    transformers_model(variant).save_pretrained(tmp_path)
    texts = [token_ids(length, seed) for seed, length in enumerate(LENGTHS)]
    oracle = load_oracle(tmp_path, dtype=torch.float32, quantization_config=quantization_config())

    model = get_model(tmp_path, torch.float32, quantization="torchao")
    actual = PagedRequests(model, texts).run([[(0, 11), (1, 9), (3, 30)], [(2, 1), (0, 12), (3, 4)]])

    assert len(quantized_names(model)) > 0
    for ours, text in zip(actual, texts, strict=True):
        with torch.inference_mode():
            assert relative_error(ours, oracle(torch.tensor([text])).logits[0]) < 1e-5


@pytest.fixture(scope="module", params=["llama-linear-rope-biases-tied", "qwen3-wide-heads"])
def world(request, tmp_path_factory):
    return tiny_world(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def oracle(world):
    return quantized_oracle(world.base, {name: world.path(name) for name in world.names})


@pytest.fixture(scope="module")
def pairs(world):
    """(adapter, prompt): one prompt for all, and one of each one's own."""
    adapters = [None, *world.names]
    own = [(name, token_ids(3 + 5 * number, 50 + number)) for number, name in enumerate(adapters)]
    return [(name, token_ids(12, 1)) for name in adapters] + own


class TestMixedBatch:
    def serve(self, world, pairs, **options):
        """Tokens, and the logprobs of the whole vocabulary (tokens, V), of each pair."""
        engine = world.engine(dtype="float32", quantization="torchao", max_num_batched_tokens=29, **options)
        everything = greedy(NUM_TOKENS, logprobs=engine.config.model_config.get_vocab_size())
        for number, (name, prompt) in enumerate(pairs):
            engine.add_request(str(number), prompt, everything, lora_request=world.request(name))
        outputs = run(engine)
        assert engine.trace.summary()["mixed_steps"] > 0
        completions = [outputs[str(number)].outputs[0] for number in range(len(pairs))]
        return [
            (
                completion.token_ids,
                torch.tensor([[row[i].logprob for i in range(len(row))] for row in completion.logprobs]),
            )
            for completion in completions
        ]

    @pytest.mark.parametrize(
        "backend", ["auto", pytest.param("triton", marks=[pytest.mark.nightly, interpreted])]
    )
    def test_gives_the_tokens_and_logits_of_peft_on_the_same_int8_weights_and_not_those_of_plain_ones(
        self, world, oracle, pairs, backend
    ):
        plain = world.oracle(torch.float32)

        served = self.serve(world, pairs, punica_backend=backend)

        for (name, prompt), (tokens, logprobs) in zip(pairs, served, strict=True):
            assert tokens == oracle.greedy(name, prompt, NUM_TOKENS), name
            same, other = (
                each.logits(name, [prompt + tokens])[0, len(prompt) - 1 : -1].log_softmax(-1)
                for each in (oracle, plain)
            )
            assert (logprobs - same).abs().max() < 1e-4, name
            assert (logprobs - other).abs().max() > 1e-3, name

    def test_takes_slots_in_full_as_many_bytes_as_ever(self, world):
        plain, quantized = (
            world.engine(dtype="float32", quantization=name, punica_backend="grouped")
            for name in (None, "torchao")
        )

        memory = [engine.debug_info()["memory"] for engine in (plain, quantized)]

        assert memory[0] == memory[1]
        for module in quantized.adapters.manager.wrapped.modules.values():
            assert {buffer.dtype for buffer in (*module.slots.a, *module.slots.b)} == {torch.float32}


class TestOptions:
    @pytest.fixture
    def llama(self, tmp_path_factory):
        return tiny_world(tmp_path_factory)

    def config(self, llama, **options):
        values = {"model": str(llama.base), "device": "cpu", "quantization": "torchao", **options}
        return EngineArgs(**values).create_engine_config()

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({"quantization": "int4"}, "quantization 'int4' is not supported; use torchao, or None"),
            ({"quantization": ""}, "quantization '' is not supported"),
            ({"dtype": "float64"}, r"the dtype is torch.float64; pass --dtype bfloat16 or float32"),
            ({"dtype": "float16"}, r"the dtype is torch.float16; pass --dtype bfloat16 or float32"),
        ],
    )
    def test_that_cannot_be_are_refused_in_a_sentence(self, llama, options, complaint):
        with pytest.raises(ValueError, match=complaint):
            self.config(llama, **options)

    def test_without_the_package_the_line_that_installs_the_declared_versions_is_named(
        self, llama, monkeypatch
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]

        with pytest.raises(ModuleNotFoundError) as error:
            self.config(llama)

        [requirement] = extras["quantization"]
        assert str(error.value).endswith(
            f"torchao, which is not installed; run `pip install '{requirement}'`"
        )
        assert requirement in extras["dev"]

    @pytest.mark.parametrize(
        ("device", "asked", "slots", "backend"),
        [
            ("cuda", "auto", 2, "paged"),
            ("cuda", "auto", None, "paged"),
            ("cuda", "triton", 2, "triton"),
            ("cuda", "loops", 2, "loops"),
            ("cpu", "auto", 2, "grouped"),
        ],
    )
    def test_adapters_lie_in_pages_on_a_gpu_unless_told_otherwise(
        self, llama, monkeypatch, device, asked, slots, backend
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        options = {"device": device, "dtype": "bfloat16", "max_loras": slots, "punica_backend": asked}
        config = self.config(llama, enable_lora=True, **options)

        assert config.lora_config.backend_on(device) == backend
        assert config.lora_config.lora_dtype == torch.bfloat16

    def test_dummy_weights_are_quantized_too(self, llama, tmp_path):
        shutil.copy(llama.base / "config.json", tmp_path)
        changes = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True}
        args = EngineArgs(**{**OPTIONS, **changes, "dtype": "bfloat16", "quantization": "torchao"})

        engine = LLMEngine.from_engine_args(args)
        engine.add_request("a", token_ids(9, 1), greedy(4))

        assert len(tokens_of(run(engine)["a"])) == 4
        assert len(quantized_names(engine.runner.model)) == 8

    def test_the_command_line_has_it(self, llama):
        arguments = [
            "generate",
            "--model",
            str(llama.base),
            "--dtype",
            "float32",
            "--max-tokens",
            "3",
            "--json",
        ]

        answer = CliRunner().invoke(app, [*arguments, "--quantization", "torchao", "abc"])
        refusal = CliRunner().invoke(app, [*arguments, "--quantization", "int4", "abc"])

        assert json.loads(answer.stdout)[0]["tokens"] == 3
        assert "quantization 'int4' is not supported" in str(refusal.exception)

    @pytest.mark.nightly
    def test_the_package_is_imported_when_it_is_asked_for_and_in_silence(self, llama):
        program = (
            "import sys; from minivllm import LLM; "
            f"options = {{'model': {str(llama.base)!r}, 'dtype': 'float32', 'skip_tokenizer_init': True}}; "
            "LLM(**options); before = 'torchao' in sys.modules; "
            "LLM(**options, quantization='torchao'); print(before, 'torchao' in sys.modules)"
        )

        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

        assert result.stdout.split() == ["False", "True"]
        assert result.stderr == ""


@pytest.mark.nightly
def test_the_demo_model_answers_as_transformers_and_peft_with_the_same_int8_weights():
    base, pairs = demo_base(), task_prompts(1)
    llm = LLM(
        base,
        dtype="float32",
        quantization="torchao",
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=4,
        max_lora_rank=32,
        max_model_len=512,
        num_kv_blocks=200,
        warm_up=False,
    )
    loras = {name: LoRARequest(name, i, str(adapter_folder(name))) for i, name in enumerate(NAMES, 1)}

    outputs = llm.generate(
        [prompt for _, prompt in pairs],
        greedy(12, ignore_eos=False),
        use_tqdm=False,
        lora_request=[name and loras[name] for name, _ in pairs],
    )

    oracle = quantized_oracle(base, {name: adapter_folder(name) for name in NAMES})
    for (name, _), output in zip(pairs, outputs, strict=True):
        prompt, tokens = output.prompt_token_ids, tokens_of(output)
        rows = oracle.logits(name, [prompt + tokens])[0, len(prompt) - 1 : -1]
        lead = rows.max(-1).values - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert tokens == rows.argmax(-1).tolist(), f"{name}: differs by {lead.max():.2g} in a logit"
