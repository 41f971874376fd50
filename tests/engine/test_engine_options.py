"""Options of the engine: where it runs, in which precision, on which weights, with how large a cache."""

import json
import shutil

import pytest
import torch

from minivllm import LLM, EngineArgs, LLMEngine
from minivllm.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, parse_device
from tests.worlds.engines import OPTIONS, greedy, run
from tests.worlds.models import token_ids


@pytest.fixture
def config_only(world, tmp_path):
    """A folder with nothing but config.json."""
    shutil.copy(world.base / "config.json", tmp_path)
    return tmp_path


def pretend_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


class TestModel:
    def test_may_be_a_path_as_its_text_may(self, world, config_only):
        of_args = EngineArgs(world.base, **OPTIONS).create_engine_config().model_config

        assert of_args.model == str(world.base)
        assert ModelConfig(config_only) == ModelConfig(str(config_only))

    @pytest.mark.parametrize("make", [EngineArgs, LLM])
    def test_of_another_kind_is_refused(self, make):
        with pytest.raises(ValueError, match="model must be text, got 5"):
            made = make(5)
            made.create_engine_config()


class TestDevice:
    @pytest.mark.parametrize(
        ("gpus", "asked", "device"),
        [
            (0, "auto", "cpu"),
            (0, "cpu", "cpu"),
            (2, "auto", "cuda"),
            (2, "cuda", "cuda"),
            (2, "cuda:1", "cuda:1"),
            (2, "cpu", "cpu"),
            (2, torch.device("cuda", 0), "cuda:0"),
        ],
    )
    def test_is_the_one_asked_for_or_the_gpu_there_is(self, monkeypatch, gpus, asked, device):
        pretend_gpus(monkeypatch, gpus)

        assert parse_device(asked) == device

    @pytest.mark.parametrize(
        ("gpus", "asked", "complaint"),
        [
            (0, "cuda", "'cuda' was asked for but PyTorch finds no CUDA GPU"),
            (0, "cuda:0", "finds no CUDA GPU"),
            (1, "cuda:1", "only 1 GPUs"),
            (1, "mps", "use auto, cpu, cuda or cuda:N"),
            (1, "gpu", "'gpu' is not supported"),
            (1, "", "not supported"),
        ],
    )
    def test_that_is_not_there_is_refused_before_anything_is_loaded(
        self, monkeypatch, world, gpus, asked, complaint
    ):
        pretend_gpus(monkeypatch, gpus)

        with pytest.raises(ValueError, match=complaint):
            EngineArgs(model=str(world.base), device=asked).create_engine_config()


class TestDtype:
    @pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
    def test_auto_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(self, monkeypatch, config_only, stored):
        pretend_gpus(monkeypatch, 1)
        path = config_only / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": stored}))
        model = ModelConfig(str(config_only))

        assert EngineConfig(model, device="cuda").model_config.dtype == getattr(torch, stored)
        assert EngineConfig(model, device="cpu").model_config.dtype == torch.float32

    def test_that_is_named_holds_on_every_device_and_for_the_adapters(self, monkeypatch, world):
        pretend_gpus(monkeypatch, 1)
        model = ModelConfig(str(world.base), "float16")

        for device in ("cpu", "cuda"):
            config = EngineConfig(model, lora_config=LoRAConfig(), device=device)
            assert config.model_config.dtype == config.lora_config.lora_dtype == torch.float16


class TestDummyWeights:
    def engine(self, folder, **options):
        options = {**OPTIONS, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "auto", **options}
        return LLMEngine.from_engine_args(EngineArgs(model=str(folder), **options))

    def test_need_only_a_config_and_answer_token_ids(self, config_only):
        engine = self.engine(config_only)

        engine.add_request("a", token_ids(9, 1), greedy(5))
        output = run(engine)["a"].outputs[0]

        assert len(output.token_ids) == 5
        assert output.text == ""

    def test_are_random_by_the_seed_nowhere_zero_and_norms_are_one(self, config_only):
        models = [self.engine(config_only, seed=seed, dtype="float64").runner.model for seed in (1, 1, 2)]

        first, same, other = ({name: p.data for name, p in model.named_parameters()} for model in models)
        for name, weights in first.items():
            assert torch.equal(weights, same[name])
            if name.endswith("norm.weight"):
                assert (weights == 1).all()
            else:
                assert not torch.equal(weights, other[name])
                assert (weights != 0).all()
                assert 0.01 < weights.std() < 0.03

    def test_stay_finite_in_bfloat16_over_32_layers(self, config_only):
        path = config_only / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 32}))
        engine = self.engine(config_only, dtype="bfloat16")

        engine.add_request("a", token_ids(20, 1), greedy(3, logprobs=2))
        [logprobs, *_] = run(engine)["a"].outputs[0].logprobs

        assert all(-50 < logprob.logprob < 0 for logprob in logprobs.values())

    def test_real_weights_are_asked_for_by_default(self, config_only):
        with pytest.raises(FileNotFoundError, match=r"model.safetensors"):
            self.engine(config_only, load_format="auto")

    def test_another_format_is_refused(self, world):
        with pytest.raises(ValueError, match="load_format 'gguf' is not supported; use one of auto, dummy"):
            EngineArgs(model=str(world.base), load_format="gguf").create_engine_config()


class TestWithoutTokenizer:
    def test_text_and_chats_are_refused(self, world):
        llm = LLM(str(world.base), **OPTIONS, skip_tokenizer_init=True)

        with pytest.raises(ValueError, match="there is no tokenizer"):
            llm.generate("Hi", use_tqdm=False)
        with pytest.raises(ValueError, match="leave skip_tokenizer_init off"):
            llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), True, "0.9"])
def test_a_share_of_the_gpu_is_a_number_up_to_1(share):
    with pytest.raises(ValueError, match="gpu_memory_utilization must be a number in"):
        CacheConfig(gpu_memory_utilization=share)
