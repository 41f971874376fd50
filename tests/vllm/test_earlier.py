"""Paths and signatures of earlier versions of vLLM, which documents show, give what today's names give."""

import importlib
from types import SimpleNamespace

import pytest
import torch

import minivllm.vllm  # noqa: F401
from minivllm.config import CacheConfig, LoRAConfig, ModelConfig, SchedulerConfig
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.models.registry import get_model
from tests.worlds.engines import greedy, run, tokens_of

PATHS = {
    "config.lora": "LoRAConfig",
    "engine.arg_utils": "EngineArgs",
    "lora.layers.column_parallel_linear": "ColumnParallelLinearWithLoRA",
    "lora.layers.fused_moe": "FusedMoEWithLoRA",
    "lora.layers.row_parallel_linear": "RowParallelLinearWithLoRA",
    "lora.lora": "LoRALayerWeights PackedLoRALayerWeights",
    "lora.models": "LoRAModel LoRAModelManager LRUCacheLoRAModelManager create_lora_manager get_lora_id",
    "lora.punica_wrapper": "PunicaWrapper PunicaWrapperBase",
    "lora.punica_wrapper.punica_base": "PunicaWrapperABC PunicaWrapperBase",
    "lora.punica_wrapper.punica_cpu": "PunicaWrapperCPU",
    "lora.punica_wrapper.punica_selector": "get_punica_wrapper",
    "lora.punica_wrapper.punica_wrapper": "PunicaWrapper",
    "v1.core.sched.scheduler": "Scheduler",
    "v1.engine": "LLMEngine",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.worker.lora_model_runner_mixin": "LoRAModelRunnerMixin",
}
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "vocab_size": 97}
MODEL_SAYS = {"embedding_modules": {}, "embedding_padding_modules": [], "max_position_embeddings": 64}
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def model(world):
    return get_model(str(world.base), torch.float64, "cpu")


@pytest.fixture
def lora_config():
    return LoRAConfig(max_loras=2, max_cpu_loras=4, lora_dtype=torch.float64)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_leads_to_its_names(path):
    module = importlib.import_module(f"minivllm.{path}")

    assert [name for name in PATHS[path].split() if not hasattr(module, name)] == []


def load_by_mixin(model, lora_config):
    runner = importlib.import_module("minivllm.v1.worker.lora_model_runner_mixin").LoRAModelRunnerMixin()
    model_config = SimpleNamespace(get_vocab_size=lambda: 97)
    scheduler_config = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=32)
    assert runner.load_lora_model(model, model_config, scheduler_config, lora_config, "cpu") is model
    return runner.lora_manager


def load_by_worker_manager(model, lora_config):
    manager_class = importlib.import_module("minivllm.vllm.earlier").LRUCacheWorkerLoRAManager
    worker = manager_class(**SIZES, lora_config=lora_config, device="cpu", **MODEL_SAYS)
    assert worker.create_lora_manager(model) is model
    return worker


@pytest.mark.parametrize("load", [load_by_mixin, load_by_worker_manager])
def test_a_worker_serves_by_the_signatures_of_then(world, model, lora_config, load):
    worker = load(model, lora_config)
    request = world.request("qv")

    assert not worker.has_adapter(request.lora_int_id)
    worker.set_active_adapters([request], LoRAMapping((1,) * len(PROMPT), (1,), is_prefill=True))

    assert worker.has_adapter(request.lora_int_id)
    assert worker.list_adapters() == {request.lora_int_id}


def test_a_manager_is_made_by_the_keywords_of_then(model, lora_config):
    models = importlib.import_module("minivllm.lora.models")

    manager = models.create_lora_manager(
        model=model, **SIZES, lora_config=lora_config, device="cpu", **MODEL_SAYS
    )

    assert isinstance(manager, models.LoRAModelManager) and manager.lora_slots == 2


def read(world, name, **keywords):
    helper = PEFTHelper.from_local_dir(str(world.path(name)), max_position_embeddings=64)
    models = importlib.import_module("minivllm.lora.models")
    modules = ["q_proj", "v_proj"]
    return models.LoRAModel.from_local_checkpoint(str(world.path(name)), modules, helper, **keywords)


def test_an_adapter_is_read_without_an_id_and_gets_one_of_its_own(world):
    given = {"target_embedding_padding": None, "embedding_modules": {}, "tensorizer_config_dict": None}

    first, second = read(world, "qv", **given), read(world, "qv", dtype=torch.float64)

    assert first.id != second.id and first.loras.keys() == second.loras.keys()


def test_what_would_be_read_otherwise_is_refused(world):
    with pytest.raises(ValueError, match="tensorizer_config_dict has no meaning here"):
        read(world, "qv", tensorizer_config_dict={"uri": "s3://x"})


def test_the_wrapper_of_a_device_is_made_by_the_name_of_then():
    from minivllm.lora.punica_wrapper import PunicaWrapper, PunicaWrapperCPU

    wrapper = PunicaWrapper(max_num_batched_tokens=32, max_batches=4, device="cpu", max_loras=2)

    assert isinstance(wrapper, PunicaWrapperCPU)


def test_an_engine_made_of_its_parts_loads_and_serves_an_adapter(world):
    """The first example of documents about vLLM V1."""
    engine_class = importlib.import_module("minivllm.v1.engine").LLMEngine
    engine = engine_class(
        model_config=ModelConfig(str(world.base), dtype=torch.float64, skip_tokenizer_init=True),
        cache_config=CacheConfig(num_blocks=64),
        lora_config=LoRAConfig(max_loras=2, lora_dtype=torch.float64),
        scheduler_config=SchedulerConfig(max_num_seqs=4),
        device_config="cpu",
    )
    request = world.request("qv")

    engine.model_runner.add_lora(request)
    engine.add_request("a", PROMPT, greedy(6), lora_request=request)

    assert tokens_of(run(engine)["a"]) == world.answer("qv", PROMPT, 6)
