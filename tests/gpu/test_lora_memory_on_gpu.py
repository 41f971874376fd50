"""What LoRA takes of a GPU: as predicted, as told, and as PyTorch's allocators have it. Weights are random."""

import gc
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from labs.kit.regions import ROOT
from minivllm import EngineArgs, LLMEngine, LoRARequest
from minivllm.assembly import parts_of
from minivllm.commands.random_adapter import save_random_adapter
from minivllm.economics import slot_memory, weight_bytes
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.models.registry import get_model
from minivllm.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from tests.tools.device import needs_cuda

pytestmark = needs_cuda

EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}
WITHOUT_THE_ENDS = {"mixtral": ["experts"]}
TABLES = 26_000  # of pages, and counts of the kernels that read them: not predicted
LINEARS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SHAPES = {  # a whole small model, with many tokens; blocks of a larger one; the same with experts
    "qwen-0.6b": ("qwen-0.6b", {}),
    "llama-8b": ("llama-8b", {"num_hidden_layers": 4, "vocab_size": 128256}),
    "mixtral": ("llama-8b", EXPERTS),
}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("shapes") / request.param
    path.mkdir()
    shape, changes = SHAPES[request.param]
    config = json.loads((ROOT / "benchmarks" / "shapes" / shape / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def engine_config(folder, **options):
    args = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_lora": True,
        "device": "cuda",
        "max_loras": 8,
        "max_cpu_loras": 8,
        "max_model_len": 1024,
        "warm_up": False,
        "enforce_eager": True,
        **options,
    }
    return EngineArgs(model=str(folder), **args).create_engine_config()


class WithTheProductsParts(LoRAModelRunnerMixin):
    @staticmethod
    def make_lora_manager(config, device):
        parts = parts_of(config)
        make_manager = partial(parts.manager_class, **parts.manager)
        return LRUCacheWorkerLoRAManager(config, device, make_manager=make_manager, extensions=parts.lora)


def allocated():
    """Bytes in use, as the allocator rounds them; as they were asked for; and those in rests that it left unsplit."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    return SimpleNamespace(
        rounded=torch.cuda.memory_allocated(),
        asked=stats["requested_bytes.all.current"],
        unsplit=sum(map(unsplit_bytes, torch.cuda.memory_snapshot())),
    )


def unsplit_bytes(segment):
    """Bytes of a segment's blocks past what was asked for, rounded up to 512 bytes.

    A block is cut from a cached piece of memory, and keeps a rest that is too short to be a piece of its own. Blocks of
    more than 1 MiB keep up to 1 MiB, smaller ones nothing (`should_split`, c10/cuda/CUDACachingAllocator.cpp). So it
    depends on what was freed before.
    """
    most = 2**20 if segment["segment_type"] == "large" else 0
    in_use = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
    rests = [block["size"] - -(-block["requested_size"] // 512) * 512 for block in in_use]
    assert all(0 <= rest <= most for rest in rests), f"{max(rests):,} bytes unsplit"
    return sum(rests)


def assert_within(percent, found, expected):
    assert abs(found - expected) <= expected * percent / 100, f"{found:,} bytes instead of {expected:,}"


def assert_told_is_taken(told, before, after):
    """What is told is what was asked for, to the byte, and what was taken but for the allocator's own rules."""
    assert told == after.asked - before.asked
    taken, unsplit = after.rounded - before.rounded, after.unsplit - before.unsplit
    assert_within(0.1, told, taken - unsplit)


@pytest.mark.parametrize("has_ends", [True, False], ids=["all", "without-the-ends"])
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("backend", ["paged", "triton"])
def test_wrapping_takes_what_was_predicted_and_is_told(folder, backend, rank, has_ends):
    targets = None if has_ends else WITHOUT_THE_ENDS.get(folder.name, LINEARS)
    config = engine_config(folder, punica_backend=backend, max_lora_rank=rank, target_modules=targets)
    model = get_model(folder, config.model_config.dtype, "cuda", load_format="dummy")
    before = allocated()

    runner = WithTheProductsParts()
    runner.load_lora_model(model, config, "cuda")

    after = allocated()
    manager = runner.lora_manager.manager
    told = manager.get_memory_stats()
    predicted = slot_memory(
        config.model_config.architecture, config.lora_config, "cuda", config.model_config.dtype
    )
    print(
        f"{folder.name} {backend} rank {rank} {'all' if has_ends else 'without the ends'}: "
        f"predicted {predicted.total:,} told {told['device_total']:,} "
        f"asked {after.asked - before.asked:,} allocated {after.rounded - before.rounded:,} "
        f"unsplit {after.unsplit - before.unsplit:,}"
    )
    assert told["slot_buffers"] == predicted.slots
    assert told["staging"] == predicted.staging
    assert_within(0.1, predicted.total + TABLES * (backend == "paged"), told["device_total"])
    assert_told_is_taken(told["device_total"], before, after)


def test_biases_added_tokens_and_longer_contexts_are_told_too(folder):
    options = {"bias_enabled": True, "lora_extra_vocab_size": 64, "long_lora_scaling_factors": (2.0,)}
    config = engine_config(folder, max_lora_rank=16, **options)
    model = get_model(folder, config.model_config.dtype, "cuda", load_format="dummy")
    before = allocated()

    runner = WithTheProductsParts()
    runner.load_lora_model(model, config, "cuda")

    after = allocated()
    assert_told_is_taken(runner.lora_manager.manager.get_memory_stats()["device_total"], before, after)


@pytest.mark.alone_on_gpu
def test_a_kv_cache_is_smaller_by_what_slots_take(folder):
    allocated()
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 16 * 2**30) / total  # so few that requests are not what limits the cache
    kv_bytes, taken = [], []
    for slots in (1, 8):
        # Slots of one size: pages are of the KV cache's memory.
        # Few tokens a step: sampling all rows of a full one takes some 14 times their logits in float32.
        options = {
            "max_loras": slots,
            "punica_backend": "triton",
            "max_lora_rank": 64,
            "max_num_seqs": 4096,
            "max_num_batched_tokens": 256,
        }
        before = allocated()
        engine = LLMEngine(
            engine_config(folder, gpu_memory_utilization=share, **options), None, warm_up=False
        )
        info = engine.debug_info()
        kv_bytes.append(info["kv_bytes"])
        taken.append(info["memory"]["device_total"])
        assert allocated().rounded - before.rounded < 16 * 2**30
        del engine

    print(f"{folder.name}: slots take {taken}, keys and values {kv_bytes}")
    # A profile run differs a little by the number of its slots, and so does what the driver holds.
    assert_within(2, kv_bytes[0] - kv_bytes[1], taken[1] - taken[0])


def test_slots_that_do_not_fit_are_refused_and_nothing_is_taken(folder):
    config = engine_config(folder, max_loras=20_000, max_lora_rank=64, max_cpu_loras=20_000)
    before = allocated()
    torch.cuda.reset_peak_memory_stats()

    with pytest.raises(
        ValueError, match=r"LoRA slots need [\d,]+ bytes, but cuda has [\d,]+ for them: lower max_l"
    ):
        LLMEngine(config, None, warm_up=False)

    taken = torch.cuda.max_memory_allocated() - before.rounded
    assert taken < weight_bytes(config.model_config.architecture) + 2**30


def test_adapters_in_memory_take_what_is_told_of_page_locked_memory(folder, tmp_path):
    if folder.name == "mixtral":
        pytest.skip("random adapters have dense linears")
    engine = LLMEngine(engine_config(folder, max_lora_rank=32, num_kv_blocks=64), None, warm_up=False)
    writer = engine.adapters.manager.slot_writer
    gc.collect()
    assert not writer.pools, "adapters of the profile run are gone"

    for i, rank in enumerate((8, 16, 32), start=1):
        path = save_random_adapter(tmp_path / str(i), str(folder), rank, i, torch.bfloat16)
        engine.add_lora(LoRARequest(f"a{i}", i, str(path)))

    torch.cuda.synchronize()
    told = engine.debug_info()["memory"]
    held = sum(pool.nbytes for pool in writer.pools.values())
    assert all(pool.is_pinned() for pool in writer.pools.values())
    print(
        f"{folder.name}: told {told['cpu_total']:,} of {told['slot_bytes_by_adapter']} page-locked {held:,}"
    )
    assert told["cpu_total"] == held <= writer.memory.nbytes
    assert told["cpu_total"] == sum(told["cpu_bytes_by_adapter"].values())
