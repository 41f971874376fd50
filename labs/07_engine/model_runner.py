"""Runs the model on what the scheduler decided. Stands for vllm/v1/worker/gpu_model_runner.py (v0.22.1)."""

from minivllm.labs import Todo
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from minivllm.config import CPU_KV_CACHE_BYTES, EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.faults import as_fault
from minivllm.layers.attention import Attention, AttentionMetadata
from minivllm.layers.penalties import TokenHistory
from minivllm.layers.sampler import Logprob, Sampler
from minivllm.models.registry import get_model
from minivllm.sampling_params import SamplingParams
from minivllm.worker.cpu_threads import cpu_threads
from minivllm.worker.cuda_graphs import CUDAGraphWrapper, DecodeGraphs, DecodeStep, no_garbage_collection
from minivllm.worker.decode_buffers import DecodeBuffers
from minivllm.worker.gpu_memory import determine_available_memory, refuse_slots_that_do_not_fit
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from minivllm.worker.prefetch import AdapterPrefetch
from minivllm.worker.row_sampler import RowSampler, takes_likeliest


@dataclass(frozen=True)
class PendingStep:
    """A step that was launched; its tokens are not read yet.

    requests   the P rows that sample
    logits     (P or more, V), the rows' own first; None when no row samples
    tokens     (P or more,) int64, the likeliest of each row if the step has found it already
    errors     request id -> what its own row's sampling raised; filled in by `sample_tokens`
    """

    requests: list[Request]
    logits: torch.Tensor | None
    tokens: torch.Tensor | None = None
    errors: dict[str, BaseException] = field(default_factory=dict)


class ModelRunner(LoRAModelRunnerMixin, AdapterPrefetch):
    """One model on one device, its KV cache, and its adapters. vLLM: `GPUModelRunner`.

    num_blocks      KV blocks there are, block 0 included, which is never handed out
    decode_graphs   captured decode steps, once `capture_model` has run; None = every step runs eagerly
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = config.device
        model_config = config.model_config
        self.on_gpu = torch.device(self.device).type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(torch.device(self.device).index or 0)  # Triton launches on the current one
        self.use_paged_attention = self.on_gpu and model_config.dtype in (torch.float16, torch.bfloat16)
        self.decode_graphs: DecodeGraphs | None = None
        self.cpu_threads = cpu_threads(config)
        with self.cpu_threads.in_use():
            self.model = get_model(
                model_config.model,
                model_config.dtype,
                self.device,
                load_format=model_config.load_format,
                seed=model_config.seed,
                quantization=model_config.quantization,
            )
            if config.lora_config is not None:
                refuse_slots_that_do_not_fit(config)
                self.model = self.load_lora_model(self.model, config, self.device)
            self.sampler = Sampler(model_config.architecture.eos_token_ids, model_config.seed)
            self.row_sampler = RowSampler(self.sampler)
            self.num_blocks = self._num_kv_blocks()
            self._allocate_kv_cache(self.num_blocks)
        rows = config.scheduler_config.max_num_seqs
        self.cpu_threads.measure_on(self.model, rows, model_config.dtype)

    # ---- the KV cache ---------------------------------------------------------------------------------------

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers."""
        arch = self.config.model_config.architecture
        per_token = 2 * arch.num_hidden_layers * arch.num_key_value_heads * arch.head_dim
        return self.config.cache_config.block_size * per_token * self.config.model_config.dtype.itemsize

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
        left = determine_available_memory(self._profile_run, self.device, cache.gpu_memory_utilization)
        if left < 2 * self.kv_block_bytes:
            raise ValueError(
                f"weights, LoRA slots and the largest step leave {left / 2**20:.0f} MiB of the GPU for keys and "
                f"values at gpu_memory_utilization {cache.gpu_memory_utilization}; raise it, or lower "
                "max_num_batched_tokens or max_loras"
            )
        return left

    def _allocate_kv_cache(self, num_blocks: int) -> None:
        for module in self.model.modules():
            if isinstance(module, Attention):
                shape = module.kv_cache_shape(num_blocks, self.config.cache_config.block_size)
                dtype = self.config.model_config.dtype
                module.bind_kv_cache(torch.zeros(shape, dtype=dtype, device=self.device))

    # ---- one step -------------------------------------------------------------------------------------------

    def execute_model(self, output: SchedulerOutput) -> dict[str, tuple[int, dict[int, Logprob] | None]]:
        """One forward pass for the whole batch, whatever adapters it mixes.

        Returns request id -> (token, its logprobs if asked for), for every row that samples.
        """
        return self.sample_tokens(self.launch_model(output))

    # region lab 7.3: one mixed step
    @torch.inference_mode()
    def launch_model(self, output: SchedulerOutput) -> PendingStep:
        """Start the forward pass. On a GPU it runs on while the caller does something else.

        With LoRA on, the batch's adapters are made active first, padded to `_graph_size`. Where that is not 0 a
        captured step is replayed (`_replay`); else the model runs on all tokens of all rows at once, and logits
        are computed for the rows that sample, and for no other. Returns them in the order of the batch, and
        PendingStep([], None) if no row samples.
        """
        raise Todo("lab 7.3: one mixed step")

    def _prepare_inputs(
        self, batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
        """What the model is given: the rows' new tokens end to end, T in all; rows without tokens are left out.

        Returns
            input_ids   (T,) int64, of each row the tokens that follow those computed
            positions   (T,) int64, of each token in its own request
            attn        `_build_attention` of the rows: new tokens, context lengths with them, and block tables
            last_rows   (P,) int64, where among the T the last token of each row that samples is
        """
        raise Todo("lab 7.3: one mixed step")

    # endregion

    @torch.inference_mode()
    def sample_tokens(self, step: PendingStep) -> dict[str, tuple[int, dict[int, Logprob] | None]]:
        """Pick the tokens of a step that was launched, and wait for them; returns as `execute_model`.

        Rows that cannot be sampled are left out; `step.errors` has them.
        """
        if not step.requests:
            return {}
        if step.tokens is not None and all(map(takes_likeliest, step.requests)):
            tokens = step.tokens[: len(step.requests)].tolist()
            return {request.request_id: (token, None) for request, token in zip(step.requests, tokens)}
        logits = step.logits[: len(step.requests)]
        try:
            return self.row_sampler.sample(step.requests, logits)
        except BaseException as error:
            sampled, errors = self.row_sampler.sample_apart(step.requests, logits, as_fault(error))
            step.errors.update(errors)
            return sampled

    def _graph_size(self, batch: InputBatch) -> int:
        """Rows of the CUDA graph that can run the batch; 0 if it must run eagerly."""
        tokens = batch.num_scheduled_tokens
        # Rows with one token that samples, and idle ones; a prompt has more, or does not sample yet.
        if self.decode_graphs is None or (tokens != batch.num_sampled_tokens).any():
            return 0
        return self.decode_graphs.padded_size(int(tokens.sum())) or 0

    def _replay(self, batch: InputBatch, size: int) -> PendingStep:
        rows = [r for r, tokens in zip(batch.requests, batch.num_scheduled_tokens.tolist()) if tokens]
        self.decode_graphs.buffers.fill(
            [request.all_token_ids[request.num_computed_tokens] for request in rows],
            [request.num_computed_tokens for request in rows],
            [request.block_ids for request in rows],
            size,
        )
        return PendingStep(rows, *self.decode_graphs.replay(size, self._batch_has_loras()))

    def _batch_has_loras(self) -> bool:
        return self.lora_manager is not None and not self.lora_manager.manager.punica_wrapper.no_lora

    def _build_attention(
        self, query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]]
    ) -> AttentionMetadata:
        block_size = self.config.cache_config.block_size
        if self.use_paged_attention:
            from minivllm.layers.paged_attention import PagedAttentionMetadata

            longest = self.config.model_config.max_model_len
            return PagedAttentionMetadata.build(
                query_lens, seq_lens, block_tables, block_size, self.device, longest
            )
        dtype = self.config.model_config.dtype
        return AttentionMetadata.build(query_lens, seq_lens, block_tables, block_size, self.device, dtype)

    def forget_request(self, request_id: str) -> None:
        """Drop what is kept for a request; call it when the request has ended."""
        self.row_sampler.forget(request_id)

    # ---- before the first step ------------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one prompt and one decode batch, so that the first request does not pay for first calls.

        On a GPU, the largest step runs too, since it has kernels of its own, and decode steps are captured if the
        model allows it.
        """
        tokens = min(16, self.config.cache_config.block_size, self.config.model_config.max_model_len)
        rows = min(8, self.config.scheduler_config.max_num_seqs)
        self.cpu_threads.measure()
        for query_lens in ([tokens], [1] * rows, *([self._largest_step()] if self.on_gpu else [])):
            self.cpu_threads.run(partial(self._dummy_run, query_lens))
        eager = self.config.model_config.enforce_eager or not self.model.supports_cuda_graphs
        if self.use_paged_attention and not eager:
            self.capture_model()

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
        wrapper = wrapper or partial(CUDAGraphWrapper, pool=torch.cuda.graph_pool_handle())
        lora_config, max_model_len = self.config.lora_config, self.config.model_config.max_model_len
        scheduler = self.config.scheduler_config
        buffers = DecodeBuffers(
            min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
            self.max_blocks_per_request,
            self.config.cache_config.block_size,
            self.device,
        )
        graphs = DecodeGraphs(self.model, buffers, max_model_len, wrapper)
        with no_garbage_collection(), self.maybe_setup_dummy_loras(lora_config):
            for size in reversed(graphs.sizes):
                rows = np.ones(size, dtype=np.int64)
                for with_lora in (True, False) if lora_config else (False,):
                    self.select_dummy_loras(lora_config, rows, rows, with_lora)
                    graphs.capture(size, with_lora)
        self.decode_graphs = graphs
