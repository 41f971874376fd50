"""One forward pass over a mixed batch. Stands for `execute_model` of vllm/v1/worker/gpu_model_runner.py (v0.22.1)."""

from minivllm.labs import Todo
import numpy as np
import torch

from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.layers.attention import AttentionMetadata
from minivllm.layers.paged_attention import PagedAttentionMetadata
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from minivllm.worker.prompt_logprobs import score_prompts
from minivllm.worker.row_sampler import PendingStep, Sampled


class StepRunner(LoRAModelRunnerMixin):
    """The half of a `ModelRunner` that runs a step. The other half makes the model, its cache and its graphs."""

    def execute_model(self, output: SchedulerOutput) -> Sampled:
        """One forward pass for the whole batch, whatever adapters it mixes.

        Returns request id -> (token, its logprobs if asked for), for every row that samples.
        """
        return self.sample_tokens(self.launch_model(output))

    # region lab 7.3: one mixed step
    @torch.inference_mode()
    def launch_model(self, output: SchedulerOutput) -> PendingStep:
        """Start the forward pass. On a GPU it runs on while the caller does something else.

        A CUDA graph may be able to run the batch: `decode_graphs.size_for` has its rows, 0 = none. With LoRA on, the
        batch's adapters are made active first, padded to these rows. If there is a graph, it runs
        (`decode_graphs.run`). Else the model runs on all tokens of all rows at once. Logits are computed for the rows
        that sample, and for no other. Last `score_prompts` sees to prompts whose logprobs are asked for.

        Returns the logits in the order of the batch, and PendingStep([], None) if no row samples.

        To use: `InputBatch` and its three fields (input_batch.py), `set_active_loras` where there is a `lora_manager`
        (lora_model_runner_mixin.py). `decode_graphs`, perhaps None: `size_for(batch)`, `run(batch, rows, with_lora)`
        (cuda_graphs.py), with `_batch_has_loras()` (warm_up.py). `model(input_ids, positions, attn)`: hidden states
        (T, H); `model.compute_logits` gives the logits of some. `PendingStep(requests that sample, logits)`
        (row_sampler.py), `score_prompts(self, batch, hidden_states)` (prompt_logprobs.py).
        """
        raise Todo("lab 7.3: one mixed step")

    def _prepare_inputs(
        self, batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
        """What the model is given: the rows' new tokens end to end, T in all. Rows without tokens are left out.

        Returns
            input_ids   (T,) int64, of each row the tokens that follow those computed
            positions   (T,) int64, of each token in its own request
            attn        `_build_attention` of the rows: new tokens, context lengths with them, and block tables
            last_rows   (P,) int64, where among the T the last token of each row that samples is

        All of them on `self.device`. To use: `all_token_ids`, `num_computed_tokens` and `block_ids` of a request
        (core/request.py).
        """
        raise Todo("lab 7.3: one mixed step")

    # endregion

    @torch.inference_mode()
    def sample_tokens(self, step: PendingStep) -> Sampled:
        """Pick the tokens of a step that was launched, and wait for them; returns as `execute_model`.

        Rows that cannot be sampled are left out; `step.errors` has them.
        """
        return self.row_sampler.sample_step(step) if step.requests else {}

    def _build_attention(
        self, query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]]
    ) -> AttentionMetadata:
        rows = query_lens, seq_lens, block_tables, self.config.cache_config.block_size, self.device
        if self.use_paged_attention:
            return PagedAttentionMetadata.build(*rows, self.config.model_config.max_model_len)
        return AttentionMetadata.build(*rows, self.config.model_config.dtype)

    def forget_request(self, request_id: str) -> None:
        """Drop what is kept for a request; call it when the request has ended."""
        self.row_sampler.forget(request_id)
