"""Runs the model on what the scheduler decided. Stands for vllm/v1/worker/gpu_model_runner.py (v0.22.1)."""

import numpy as np
import torch

from minivllm.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.layers.attention import Attention, AttentionMetadata
from minivllm.layers.sampler import Logprob, Sampler, make_generator
from minivllm.lora.stats import LoRAStats
from minivllm.models.registry import get_model
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.lora_model_runner_mixin import LoRAModelRunnerMixin


class ModelRunner(LoRAModelRunnerMixin):
    """One model on one device, its KV cache, and its adapters. vLLM: `GPUModelRunner`.

    num_blocks   KV blocks there are, block 0 included, which is never handed out
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = config.device
        model_config = config.model_config
        self.model = get_model(model_config.model, model_config.dtype, self.device)
        if config.lora_config is not None:
            self.model = self.load_lora_model(self.model, config, self.device)
        self.sampler = Sampler(model_config.architecture.eos_token_ids, model_config.seed)
        self._generators: dict[str, torch.Generator | None] = {}
        self.num_blocks = self._allocate_kv_cache()

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers."""
        arch = self.config.model_config.architecture
        per_token = 2 * arch.num_hidden_layers * arch.num_key_value_heads * arch.head_dim
        return self.config.cache_config.block_size * per_token * self.config.model_config.dtype.itemsize

    def _allocate_kv_cache(self) -> int:
        cache, scheduler = self.config.cache_config, self.config.scheduler_config
        num_blocks = cache.num_blocks
        if num_blocks is None:
            longest = -(-self.config.model_config.max_model_len // cache.block_size)
            useful = scheduler.max_num_seqs * longest + 1
            num_blocks = max(2, min(useful, cache.memory_bytes // self.kv_block_bytes))
        for module in self.model.modules():
            if isinstance(module, Attention):
                shape = module.kv_cache_shape(num_blocks, cache.block_size)
                dtype = self.config.model_config.dtype
                module.bind_kv_cache(torch.zeros(shape, dtype=dtype, device=self.device))
        return num_blocks

    # region lab 7.3: one mixed step
    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> dict[str, tuple[int, dict[int, Logprob] | None]]:
        """One forward pass for the whole batch, whatever adapters it mixes.

        Returns request id -> (token, its logprobs if asked for), for every row that samples.
        """
        batch = InputBatch.from_scheduler_output(output)
        if self.lora_manager is not None:
            self.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)
        input_ids, positions, attn, last_rows = self._prepare_inputs(batch)
        hidden_states = self.model(input_ids, positions, attn)  # (T, H)
        sampling = [r for r, samples in zip(batch.requests, batch.num_sampled_tokens) if samples]
        if not sampling:
            return {}
        logits = self.model.compute_logits(hidden_states[last_rows])  # (P, V)
        return self._sample(sampling, logits)

    # endregion

    def _prepare_inputs(
        self, batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
        """(T,) token ids, (T,) positions, the attention's metadata, and the last row of each that samples."""
        token_ids: list[int] = []
        positions: list[np.ndarray] = []
        rows: list[tuple[Request, int]] = []
        last_rows: list[int] = []
        for request, tokens, samples in zip(
            batch.requests, batch.num_scheduled_tokens.tolist(), batch.num_sampled_tokens.tolist()
        ):
            if not tokens:
                continue
            start = request.num_computed_tokens
            token_ids += request.all_token_ids[start : start + tokens]
            positions.append(np.arange(start, start + tokens))
            rows.append((request, tokens))
            if samples:
                last_rows.append(len(token_ids) - 1)
        attn = AttentionMetadata.build(
            [tokens for _, tokens in rows],
            [request.num_computed_tokens + tokens for request, tokens in rows],
            [request.block_ids for request, _ in rows],
            self.config.cache_config.block_size,
            self.device,
            self.config.model_config.dtype,
        )
        return (
            torch.tensor(token_ids, device=self.device),
            torch.from_numpy(np.concatenate(positions)).to(self.device),
            attn,
            torch.tensor(last_rows, dtype=torch.long, device=self.device),
        )

    def _sample(
        self, requests: list[Request], logits: torch.Tensor
    ) -> dict[str, tuple[int, dict[int, Logprob] | None]]:
        for request in requests:
            if request.request_id not in self._generators:
                self._generators[request.request_id] = make_generator(request.sampling_params)
        sampled = self.sampler(
            logits,
            [request.sampling_params for request in requests],
            [self._generators[request.request_id] for request in requests],
            [request.num_output_tokens for request in requests],
        )
        tokens = zip(requests, sampled.token_ids.tolist(), sampled.logprobs)
        return {request.request_id: (token, logprobs) for request, token, logprobs in tokens}

    def forget_request(self, request_id: str) -> None:
        """Drop what is kept for a request; call it when the request has ended."""
        self._generators.pop(request_id, None)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one prompt and one decode batch, so that the first request does not pay for first calls."""
        tokens = min(16, self.config.cache_config.block_size, self.config.model_config.max_model_len)
        rows = min(8, self.config.scheduler_config.max_num_seqs)
        for query_lens in ([tokens], [1] * rows):
            scheduled = np.array(query_lens)
            with self.maybe_dummy_run_with_lora(self.config.lora_config, scheduled, np.ones_like(scheduled)):
                self._dummy_run(query_lens)
        if self.lora_manager is not None:
            self.lora_manager.manager.stats = LoRAStats()

    def _dummy_run(self, query_lens: list[int]) -> None:
        """A forward pass on token 0 in the null block, whose contents nobody reads."""
        attn = AttentionMetadata.build(
            query_lens,
            query_lens,
            [[0]] * len(query_lens),
            self.config.cache_config.block_size,
            self.device,
            self.config.model_config.dtype,
        )
        positions = torch.from_numpy(np.concatenate([np.arange(n) for n in query_lens])).to(self.device)
        hidden_states = self.model(torch.zeros_like(positions), positions, attn)  # (T, H)
        self.model.compute_logits(hidden_states[-1:])
