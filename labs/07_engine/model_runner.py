"""One model on one device, its KV cache and its adapters, and the executor that runs an engine's steps on it.

Stands for vllm/v1/worker/gpu_model_runner.py and `UniProcExecutor` of vllm/v1/executor/uniproc_executor.py (v0.22.1).
"""

from labs.kit.overlay import Todo
from collections.abc import Callable
from functools import cached_property, partial
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from minivllm.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.errors import EngineDeadError
from minivllm.layers.attention import Attention, AttentionMetadata
from minivllm.layers.linear import Product
from minivllm.layers.ranks import ONE_RANK, Ranks
from minivllm.layers.sampler import Sampler
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.models.registry import get_model
from minivllm.worker.cpu_threads import cpu_threads
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.kv_memory import KVMemory
from minivllm.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from minivllm.worker.prompt_logprobs import score_prompts
from minivllm.worker.row_sampler import PendingStep, RowSampler, Sampled
from minivllm.worker.warm_up import run_warm_up_steps

# (query_lens, seq_lens, block_tables) -> the metadata that the model's attention takes.
BuildAttention = Callable[[list[int], list[int], list[list[int]]], Any]


class Graph(Protocol):
    """A captured step of a fixed size. vLLM decides in vllm/v1/cudagraph_dispatcher.py whether one runs a batch."""

    def padded(self, batch: InputBatch) -> InputBatch:
        """The batch and, as its last row, what fills the graph: a base row, because every row of a graph runs."""

    def run(self, batch: InputBatch) -> PendingStep:
        """Launch the step of a batch whose padded form has its adapters in their slots."""


class Graphs:
    """The captured steps of a runner: none.

    hold_most_steps   whether both decodes and steps that hold prompts were captured
    most_tokens       of the largest captured step that holds prompts; None = there is none
    """

    hold_most_steps = False
    most_tokens: int | None = None

    @property
    def captured(self) -> list[dict]:
        """What holds the graphs themselves."""
        return []

    def find(self, output: SchedulerOutput) -> Graph | None:
        """The graph that can run a step; None = it has to run eagerly."""
        return None


NO_GRAPHS = Graphs()


class ModelRunner(LoRAModelRunnerMixin):
    """Runs the steps that a scheduler decides. vLLM: `GPUModelRunner`.

    model          with its linears wrapped, where LoRA is on
    worker_manager  brings adapters into memory and slots; None without LoRA. `lora_manager` is how callers see it
    row_sampler    turns logits into tokens
    memory_plan    says how many KV blocks there are (`num_blocks`)
    graphs         steps that were captured; `NO_GRAPHS` until the warm-up, and where every step runs eagerly
    cpu_threads    how many CPU threads a step computes on
    warm_up_seconds   of the last step of the warm-up, a batch that decodes; None before

    What differs from one engine to another is given, and the plain part stands where nothing is:

    tp                    this process's part of every layer
    build_attention       makes the attention's metadata for a step; here it is that of PyTorch's own attention
    make_lora_manager     (config, device) -> the manager of adapters
    memory                decides how many KV blocks there are, and allocates them
    capture               makes `graphs` of a runner that is warm; None = steps are never captured
    adapters_are_active   called in each step once its adapters are in their slots, before the model runs: other ranks
                          may begin then, because they follow this one's slot table
    check_slots           called before LoRA allocates its slots; ValueError where they do not fit into memory
    linear_product        computes x W^T + b in all linears
    prepare_model         gives the model that steps run, of the one that is loaded and wrapped; here it is the same
    tokenizer             of the base model; only answers with a given structure need it
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tp: Ranks = ONE_RANK,
        build_attention: BuildAttention | None = None,
        make_lora_manager: Callable[[EngineConfig, str], Any] = LRUCacheWorkerLoRAManager,
        memory: KVMemory | None = None,
        capture: Callable[["ModelRunner"], Graphs] | None = None,
        adapters_are_active: Callable[[], None] | None = None,
        check_slots: Callable[[EngineConfig, Ranks], None] = lambda config, tp: None,
        linear_product: Product = F.linear,
        prepare_model: Callable[[nn.Module], nn.Module] = lambda model: model,
        tokenizer: Any = None,
    ) -> None:
        self.config, self.device = config, config.device
        self.tp = tp
        self.make_lora_manager = make_lora_manager
        self.memory = memory or KVMemory()
        self.graphs = NO_GRAPHS
        self.warm_up_seconds: float | None = None
        self._capture = capture
        self._adapters_are_active = adapters_are_active
        self.on_gpu = torch.device(self.device).type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(torch.device(self.device).index or 0)  # Triton launches on the current one
        model_config, block_size = config.model_config, config.cache_config.block_size
        self.build_attention = build_attention or partial(
            AttentionMetadata.build, block_size=block_size, device=self.device, dtype=model_config.dtype
        )
        self.cpu_threads = cpu_threads(config)
        with self.cpu_threads.in_use():
            self.model = get_model(
                model_config.model,
                model_config.dtype,
                self.device,
                load_format=model_config.load_format,
                seed=model_config.seed,
                quantization=model_config.quantization,
                tp=tp,
                product=linear_product,
            )
            if config.lora_config is not None:
                check_slots(config, tp)
                self.model = self.load_lora_model(self.model, config, self.device)
            self.model = prepare_model(self.model)
            self.sampler = Sampler(model_config.architecture.eos_token_ids, model_config.seed)
            self.row_sampler = RowSampler(self.sampler, tokenizer)
            self.memory_plan = self.memory.plan(self)
            self.memory.allocate(self, self.memory_plan)

    @property
    def num_blocks(self) -> int:
        return self.memory_plan.num_blocks

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer for layer in self.model.modules() if isinstance(layer, Attention)]

    @cached_property
    def kv_block_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers, as far as they are this process's."""
        block_size, itemsize = self.config.cache_config.block_size, self.config.model_config.dtype.itemsize
        return sum(prod(layer.kv_cache_shape(1, block_size)) for layer in self.attention_layers) * itemsize

    @property
    def max_blocks_per_request(self) -> int:
        return -(-self.config.model_config.max_model_len // self.config.cache_config.block_size)

    @property
    def max_sampled_rows(self) -> int:
        """The most rows that a step may sample."""
        scheduler = self.config.scheduler_config
        return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)

    def warm_up(self) -> None:
        """Run dummy steps, so that the first request does not pay for first calls; then capture graphs."""
        self.warm_up_seconds = run_warm_up_steps(self)
        if self._capture is not None and self.model.supports_cuda_graphs:
            self.graphs = self._capture(self)

    # ---- a step ---------------------------------------------------------------------------------------------

    def execute_model(self, output: SchedulerOutput) -> Sampled:
        """One forward pass for the whole batch, whatever adapters it mixes.

        Returns request id -> (token, its logprobs if requested), for every row that samples.
        """
        return self.sample_tokens(self.launch_model(output))

    # region lab 7.3: one mixed step
    @torch.inference_mode()
    def launch_model(self, output: SchedulerOutput) -> PendingStep:
        """Start the forward pass. On a GPU it runs on while the caller does something else.

        The step may have been captured as a CUDA graph (`graphs.find(output)`, None = it was not). The adapters are
        made active first (`activate`): those of the batch or, where a graph runs it, of the batch with the graph's
        padding (`graph.padded(batch)`). A graph then runs the batch itself (`graph.run(batch)`). Otherwise the model
        runs on all tokens of all rows at once. Logits are computed for the rows that sample, and for no other. Last
        `score_prompts` scores the prompts whose logprobs are requested.

        Returns the logits in the order of the batch, and PendingStep([], None) if no row samples.

        To use: `InputBatch` and its three fields (input_batch.py), `graphs` (graphs.py), `activate(batch)`.
        `model(input_ids, positions, attn)`: hidden states (T, H); `model.compute_logits(hidden_states)`: (P, H) of the
        rows that sample -> logits (P, V). `PendingStep(requests, logits)` of the rows that sample (row_sampler.py),
        `score_prompts(self, batch, hidden_states)` (prompt_logprobs.py).
        """
        raise Todo("lab 7.3: one mixed step")

    def _prepare_inputs(
        self, batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
        """What the model is given: the rows' new tokens end to end, T in all. Rows without tokens are left out.

        Returns
            input_ids   (T,) int64, of each row the tokens that follow those computed
            positions   (T,) int64, of each token in its own request
            attn        `build_attention` of three lists, each with an entry for each row: how many new tokens, the
                        context length with them, and the block table
            last_rows   (P,) int64, where among the T the last token of each row that samples is

        All of them on `self.device`.

        To use: `all_token_ids`, `num_computed_tokens` and `block_ids` of a request (core/request.py).
        """
        raise Todo("lab 7.3: one mixed step")

    # endregion

    def activate(self, batch: InputBatch) -> None:
        """Bring the adapters of a batch into their slots, where LoRA is on; then other ranks may begin the step."""
        if self.worker_manager is not None:
            rows = batch.split_at_adapters()
            self.set_active_loras(rows, rows.num_scheduled_tokens, rows.num_sampled_tokens)
        if self._adapters_are_active is not None:
            self._adapters_are_active()

    @torch.inference_mode()
    def sample_tokens(self, step: PendingStep) -> Sampled:
        """Pick the tokens of a step that was launched, and wait for them; returns as `execute_model`.

        Rows that cannot be sampled are left out; `step.errors` has them.
        """
        return self.row_sampler.sample_step(step) if step.requests else {}

    def forget_request(self, request_id: str) -> None:
        """Drop what is kept for a request; call it when the request has ended."""
        self.row_sampler.forget(request_id)


class Executor:
    """Runs each step on one model runner, in this process. vLLM: `UniProcExecutor`.

    `minivllm.parallel` has the one whose steps several ranks run; it replaces the methods below.

    error   why no step can run any more: a rank has ended. One rank alone never has
    """

    error: EngineDeadError | None = None

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def warm_up(self) -> None:
        self.runner.warm_up()

    def launch_model(self, output: SchedulerOutput) -> PendingStep:
        """Start a step's forward pass."""
        return self.runner.launch_model(output)

    def sample_tokens(self, step: PendingStep) -> Sampled:
        """Request id -> (token, logprobs) of a step that was launched; waits for them."""
        return self.runner.sample_tokens(step)

    def share_tokens(self) -> None:
        """Give other ranks the tokens that they wait for: there are none."""

    def on_death(self, listener: Callable[[Callable[[], None]], object]) -> None:
        """When a rank ends, call a listener, in another thread, with a function that raises the EngineDeadError."""

    def shutdown(self) -> None:
        """End the other ranks. What an executor ran cannot run again."""
