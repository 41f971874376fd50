"""KV blocks of a GPU: as many as fit into what the largest step leaves free. Here the GPU is made believe."""

from types import SimpleNamespace

import pytest
import torch

from minivllm import EngineArgs
from minivllm.gpu import measured_memory
from minivllm.gpu.measured_memory import MeasuredMemory, determine_available_memory
from minivllm.worker.warm_up import profile_run
from tests.worlds.engines import OPTIONS


@pytest.mark.parametrize(
    ("captured_share", "left"),
    [(0, 350), (0.5, 300)],
    ids=["no step captured", "steps half as large captured"],
)
def test_what_others_weights_steps_and_graphs_hold_is_not_left(monkeypatch, captured_share, left):
    """By hand, on a GPU of 1,000 bytes of which 900 may be used: others hold 150, weights 300, a step 100 more."""
    held = SimpleNamespace(now=300, peak=800)  # while it was loaded the model took more
    reserved = 320  # by PyTorch, with a rest of 20 between tensors
    calls = {
        "empty_cache": lambda: None,
        "synchronize": lambda *device: None,
        "reset_peak_memory_stats": lambda device: setattr(held, "peak", held.now),
        "memory_allocated": lambda device: held.now,
        "max_memory_allocated": lambda device: held.peak,
        "memory_reserved": lambda device: reserved,
        "mem_get_info": lambda device: (1000 - 150 - reserved, 1000),
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.cuda, name, call)

    found = determine_available_memory(
        lambda: setattr(held, "peak", max(held.peak, 400)), "cuda", 0.9, captured_share
    )

    assert found == left


class TestCacheSize:
    def runner(self, world, monkeypatch, left, **options):
        """A runner that believes to be on a GPU with so many bytes left."""
        engine = world.engine(num_kv_blocks=2)
        config = EngineArgs(**{"model": str(world.base), **OPTIONS, "num_kv_blocks": None, **options})
        runner = engine.runner
        runner.config, runner.on_gpu = config.create_engine_config(), True
        monkeypatch.setattr(measured_memory, "determine_available_memory", lambda *args: left)
        return runner

    def test_takes_what_is_left_in_whole_blocks(self, world, monkeypatch):
        runner = self.runner(world, monkeypatch, left=0)
        runner = self.runner(world, monkeypatch, left=7 * runner.kv_block_bytes + 5)

        assert MeasuredMemory(captures=False).plan(runner).num_blocks == 7

    def test_takes_no_more_than_all_requests_can_fill(self, world, monkeypatch):
        runner = self.runner(world, monkeypatch, left=2**40, max_num_seqs=3, max_model_len=30, block_size=8)

        assert MeasuredMemory(captures=False).plan(runner).num_blocks == 3 * 4 + 1

    def test_is_what_was_asked_for_where_it_was(self, world, monkeypatch):
        runner = self.runner(world, monkeypatch, left=2**40, num_kv_blocks=11)
        assert MeasuredMemory(captures=False).plan(runner).num_blocks == 11

        runner = self.runner(world, monkeypatch, left=2**40, kv_cache_memory_bytes=9 * runner.kv_block_bytes)
        assert MeasuredMemory(captures=False).plan(runner).num_blocks == 9

    @pytest.mark.parametrize("left", [-(2**30), 0, 100])
    def test_a_gpu_without_room_is_an_error_that_says_what_to_change(self, world, monkeypatch, left):
        runner = self.runner(world, monkeypatch, left=left)

        with pytest.raises(ValueError, match="raise it, or lower max_num_batched_tokens or max_loras"):
            MeasuredMemory(captures=False).plan(runner)

    @pytest.mark.parametrize(
        ("options", "tokens", "rows"),
        [
            ({"max_num_batched_tokens": 40, "max_model_len": 16, "max_num_seqs": 8}, [16, 16, 8], 8),
            ({"max_num_batched_tokens": 40, "max_model_len": 16, "max_num_seqs": 2}, [16, 16], 2),
            ({"max_num_batched_tokens": 3, "max_model_len": 16, "max_num_seqs": 8}, [3], 3),
        ],
    )
    def test_is_measured_at_the_largest_step_with_all_rows_sampled(
        self, world, monkeypatch, options, tokens, rows
    ):
        runner = self.runner(world, monkeypatch, 0, **options)
        seen = {}
        forward, sampler = runner.model.forward, runner.sampler.forward
        monkeypatch.setattr(
            runner.model, "forward", lambda ids, pos, attn: seen.update(attn=attn) or forward(ids, pos, attn)
        )
        monkeypatch.setattr(
            runner.sampler, "forward", lambda logits, *r: seen.update(logits=logits) or sampler(logits, *r)
        )

        profile_run(runner)

        assert seen["attn"].seq_lens == tokens
        assert len(seen["logits"]) == rows
        assert torch.isfinite(seen["logits"]).all()
        assert runner.lora_manager.manager.stats.activations == 0
        assert runner.list_loras() == set()
