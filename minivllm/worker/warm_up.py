"""What a runner does before the first step. Stands for parts of vllm/v1/worker/gpu_model_runner.py (v0.22.1)."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from math import prod

import numpy as np
import torch

from minivllm.config import CPU_KV_CACHE_BYTES
from minivllm.layers.attention import Attention
from minivllm.layers.penalties import TokenHistory
from minivllm.progress import followed
from minivllm.sampling_params import SamplingParams
from minivllm.worker.cuda_graphs import (
    CUDAGraphWrapper,
    DecodeGraphs,
    DecodeStep,
    StepOutput,
    no_garbage_collection,
)
from minivllm.worker.decode_buffers import DecodeBuffers
from minivllm.worker.dummy_loras import DummyLoRAs
from minivllm.worker.gpu_memory import memory_left
from minivllm.worker.mixed_buffers import MixedBuffers
from minivllm.worker.mixed_graphs import MixedGraphs, mixed_sizes


class WarmUp(DummyLoRAs):
    """The part of a `ModelRunner` that sizes the KV cache, and runs steps nobody asked for: to be ready, to measure
    memory, to capture graphs."""

    @cached_property
    def kv_block_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers, as far as they are this process's."""
        block_size, itemsize = self.config.cache_config.block_size, self.config.model_config.dtype.itemsize
        return sum(prod(layer.kv_cache_shape(1, block_size)) for layer in self._attention()) * itemsize

    def _attention(self) -> list[Attention]:
        return [layer for layer in self.model.modules() if isinstance(layer, Attention)]

    def _batch_has_loras(self) -> int:
        """Which of the captured steps of a size the batch needs: 0 = without adapters, 1 = with, 2 = at ends, too."""
        backend = self.lora_manager and self.lora_manager.manager.punica_wrapper
        return 0 if backend is None or backend.no_lora else 1 + backend.reaches_ends

    @property
    def max_blocks_per_request(self) -> int:
        return -(-self.config.model_config.max_model_len // self.config.cache_config.block_size)

    def _num_kv_blocks(self) -> int:
        cache = self.config.cache_config
        if cache.num_blocks is not None:
            return cache.num_blocks
        useful = self.config.scheduler_config.max_num_seqs * self.max_blocks_per_request + 1
        return max(2, min(useful, self._kv_memory() // self.kv_block_bytes))

    def _kv_memory(self) -> int:
        """Bytes for keys and values: what was asked for, or else on a CPU a fixed sum, on a GPU what is left.

        Weights and slots are there already, but only the last takes them into account: a CPU needs all three together.
        ValueError when a GPU has not even room for two blocks.
        """
        cache = self.config.cache_config
        if cache.memory_bytes is not None:
            return cache.memory_bytes
        if not self.on_gpu:
            return CPU_KV_CACHE_BYTES
        captured = mixed_sizes(self.config.scheduler_config.max_num_batched_tokens)[-1]
        share = captured / sum(self._largest_step()) if self._captures else 0
        least = 2 * self.kv_block_bytes
        return memory_left(self._profile_run, self.device, cache.gpu_memory_utilization, share, least)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one prompt and one decode batch, so that the first request does not pay for first calls.

        On a GPU, the largest step runs too, since it has kernels of its own, and steps are captured if the model
        allows it: those of most tokens first, in whose memory the others run.
        """
        tokens = min(16, self.config.cache_config.block_size, self.config.model_config.max_model_len)
        rows = min(8, self.config.scheduler_config.max_num_seqs)
        self.cpu_threads.measure()
        steps = [tokens], [1] * rows, *([self._largest_step()] if self.on_gpu else [])
        for query_lens in followed(steps, "Warming up kernels"):
            self.cpu_threads.run(partial(self._dummy_run, query_lens))
        if self._captures:
            self.capture_mixed_steps()
            self.capture_model()

    decode_buffers = DecodeBuffers

    @property
    def _captures(self) -> bool:
        """Whether steps become CUDA graphs."""
        eager = self.config.model_config.enforce_eager or not self.model.supports_cuda_graphs
        return self.use_paged_attention and not eager

    def _dummy_run(self, query_lens: list[int], num_logits: int = 1) -> torch.Tensor:
        """A forward pass on token 0 in the null block, whose contents nobody reads; (num_logits, V)"""
        scheduled = np.array(query_lens)
        sampled = np.zeros_like(scheduled)
        sampled[-1] = num_logits  # logits have adapters too, as many rows as are computed
        with self.maybe_dummy_run_with_lora(self.config.lora_config, scheduled, sampled):
            block_size = self.config.cache_config.block_size
            tables = [[0] * -(-length // block_size) for length in query_lens]
            attn = self._build_attention(query_lens, query_lens, tables)
            positions = torch.from_numpy(np.concatenate([np.arange(n) for n in query_lens])).to(self.device)
            hidden_states = self.model(torch.zeros_like(positions), positions, attn)  # (T, H)
            return self.model.compute_logits(hidden_states[-num_logits:])

    def _largest_step(self) -> list[int]:
        """As many prompt tokens as a step may have, in as few requests as there can be."""
        scheduler, longest = self.config.scheduler_config, self.config.model_config.max_model_len
        tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * longest)
        return [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)

    @torch.inference_mode()
    def _profile_run(self) -> None:
        """The step that needs most memory: as many prompt tokens as fit, and every filter on as many rows."""
        query_lens = self._largest_step()
        self._allocate_kv_cache(1)
        rows = min(sum(query_lens), self.config.scheduler_config.max_num_seqs)
        logits = self._dummy_run(query_lens, rows)  # (P, V)
        params = SamplingParams(top_k=2, top_p=0.5, min_p=0.5, presence_penalty=1)
        self.sampler(logits, [params] * rows, [None] * rows, [0] * rows, [TokenHistory([0], [0])] * rows)

    @torch.inference_mode()
    def capture_model(self, wrapper: Callable[[DecodeStep], DecodeStep] | None = None) -> None:
        """Capture decode steps of every size, without adapters and, if LoRA is on, with. vLLM: the same name.

        wrapper   what a captured step is; None = a CUDA graph
        """
        wrapper = wrapper or self._graph_wrapper
        lora_config, max_model_len = self.config.lora_config, self.config.model_config.max_model_len
        buffers = self.decode_buffers(
            self._most_rows, self.max_blocks_per_request, self.config.cache_config.block_size, self.device
        )
        graphs = DecodeGraphs(self.model, buffers, self.step_output, max_model_len, wrapper)
        with no_garbage_collection(), self.maybe_setup_dummy_loras(lora_config):
            for size in followed(graphs.sizes[::-1], "Capturing decode steps"):
                rows = np.ones(size, dtype=np.int64)
                for with_lora in (1, 2, 0) if lora_config else (0,):
                    self.select_dummy_loras(lora_config, rows, rows, with_lora > 0)
                    if with_lora > self._batch_has_loras():
                        continue  # no layer asks: neither embedding nor head is wrapped
                    with self.without_ends() if with_lora == 1 else nullcontext():
                        graphs.capture(size, with_lora)
        self.decode_graphs = graphs

    @torch.inference_mode()
    def capture_mixed_steps(self, wrapper: Callable[[DecodeStep], DecodeStep] | None = None) -> None:
        """Capture steps that hold prompts, for every number of tokens, as `capture_model` does those of decodes."""
        from minivllm.layers.triton_ops.mixed_attention import queries_per_tile  # Triton is not everywhere

        config = self.config
        buffers = MixedBuffers(
            mixed_sizes(config.scheduler_config.max_num_batched_tokens)[-1],
            self._most_rows,
            self.max_blocks_per_request,
            config.cache_config.block_size,
            queries_per_tile(self._attention()[0].group_size),
            self.device,
        )
        graphs = MixedGraphs(self.model, buffers, self.step_output, wrapper or self._graph_wrapper)
        with no_garbage_collection(), self.maybe_setup_dummy_loras(config.lora_config):
            for size in followed(graphs.sizes[::-1], "Capturing steps with prompts"):
                tokens = np.ones(size, dtype=np.int64)
                samples = (np.arange(size) < buffers.rows_of(size)).astype(np.int64)
                for with_lora in (True, False) if config.lora_config else (False,):
                    self.select_dummy_loras(config.lora_config, tokens, samples, with_lora)
                    graphs.capture(size, with_lora)
        self.use_mixed_graphs(graphs)

    @property
    def _most_rows(self) -> int:
        """That a step may sample."""
        scheduler = self.config.scheduler_config
        return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)

    @cached_property
    def step_output(self) -> StepOutput:
        """What all captured steps write."""
        return StepOutput(self._most_rows, self.device)

    @cached_property
    def _graph_wrapper(self) -> Callable[[DecodeStep], DecodeStep]:
        return partial(CUDAGraphWrapper, pool=torch.cuda.graph_pool_handle())
