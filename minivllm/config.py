"""What an engine is built from, validated once. Stands for vllm/config/ (v0.22.1)."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from minivllm.errors import (
    is_folder,
    is_list_of_names,
    is_real,
    require_at_most,
    require_bool,
    require_int,
    require_one_of,
    require_text,
    shown,
)
from minivllm.models.config import ModelArchitecture

EVICTION_POLICIES = ("lru", "lfu", "gdsf")
SCHEDULING_POLICIES = ("fcfs", "adapter-affine", "rank-aware", "shortest-first", "fair")
PUNICA_BACKENDS = ("auto", "loops", "grouped", "triton", "paged", "invariant")
PAGED_BACKENDS = ("paged", "invariant")
KERNEL_BACKENDS = ("triton", *PAGED_BACKENDS)
# Ranks of all layers in one page of these: an adapter of rank r takes ceil(r / PAGE_RANKS) pages.
PAGE_RANKS = 8
LOAD_FORMATS = ("auto", "dummy")
CPU_KV_CACHE_BYTES = 2**30
# Slots where adapters lie in pages and nobody says how many. The last bounds slots times rank.
MOST_SLOTS, LEAST_SLOTS, MOST_SLOT_RANKS = 256, 32, 4096
# The same where all slots are of one size, and allocated at the start.
SLOTS = 4
# No memory holds slots of more. Even to count their bytes would take all there is, or overflow.
LARGEST_LORAS, LARGEST_RANK, LARGEST_EXTRA_VOCAB = 1_000_000, 2**20, 2**20
LARGEST_THREADS = 1024
LARGEST_FACTOR = 2**32  # of positions: no memory holds so many angles
TORCHAO_REQUIREMENT = "torchao>=0.18,<0.19"
_DTYPE_NAMES = ("float32", "float", "float64", "double", "bfloat16", "float16", "half")
DTYPES = {name: getattr(torch, name) for name in _DTYPE_NAMES}


@dataclass(frozen=True)
class LoRAConfig:
    """How much LoRA the engine makes room for. vLLM: `LoRAConfig`.

    `minivllm.economics.slot_memory` tells beforehand what that takes.

    max_lora_rank   R: the largest rank a slot holds
    max_loras       S: slots, so the most distinct adapters of one batch. None = as many as memory and demand ask for
                    where adapters lie in pages (see `on_device`), else 4; never more than `max_cpu_loras`
    max_cpu_loras   adapters kept in memory, those in slots included; None = max_loras, never fewer
    lora_dtype      of the slot buffers and of loaded adapters; "auto" = the model's
    target_modules  wrap only these modules (suffixes or full names); None = all that can be: linears, embeddings,
                    experts
    fully_sharded_loras  whether processes that share a model share out both A and B; else each has one of them whole.
                    They then meet once more for every linear. A process alone has all anyhow
    punica_backend  "loops" (token by token), "grouped" (by adapter), "triton" (SGMV kernels), "paged" (SGMV kernels
                    over pages of a few ranks), "invariant" (paged, for `batch_invariant`). "auto" = grouped on a CPU,
                    paged on CUDA, but triton where processes share out both A and B
    bias_enabled    serve adapters that have a bias on B (PEFT's `lora_bias`); `enable_lora_bias` says the same
    enable_dora     serve adapters with PEFT's `use_dora`, which need N elements of every slot and linear
    lora_extra_vocab_size      X: the most tokens that an adapter may add (`new_embeddings.safetensors`)
    long_lora_scaling_factors  linear rotary factors, each >= 1, that adapters for longer contexts may have; 1 is every
                    adapter's anyway and is left out, also in the form {"factor": 1.0, ...} that documents show
    refuse_pickles  refuse adapters in .bin and .pt files, however harmless they look
    eviction_policy  who leaves full slots, or memory, of EVICTION_POLICIES; see `minivllm.policies.keeping`
    """

    max_lora_rank: int = 16
    max_loras: int | None = 1
    max_cpu_loras: int | None = None
    lora_dtype: str | torch.dtype = "auto"
    target_modules: list[str] | None = None
    fully_sharded_loras: bool = False
    punica_backend: str = "auto"
    bias_enabled: bool = False
    enable_dora: bool = False
    lora_extra_vocab_size: int = 0
    long_lora_scaling_factors: tuple[float, ...] | None = None
    enable_lora_bias: bool = False
    refuse_pickles: bool = False
    eviction_policy: str = "lru"

    def __post_init__(self) -> None:
        require_int(1, max_lora_rank=self.max_lora_rank)
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", self.max_loras)
        for name in ("max_loras", "max_cpu_loras"):
            if getattr(self, name) is not None:
                require_int(1, **{name: getattr(self, name)})
        require_at_most(LARGEST_LORAS, max_loras=self.max_loras or 1)
        require_at_most(LARGEST_RANK, max_lora_rank=self.max_lora_rank)
        if self.max_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras}): "
                "an adapter in a slot is kept in memory too"
            )
        if self.lora_dtype != "auto":
            object.__setattr__(self, "lora_dtype", parse_dtype(self.lora_dtype, "lora_dtype"))
        targets = self.target_modules
        if targets is not None and not (is_list_of_names(targets) and targets):
            raise ValueError(f"target_modules must be a list of names, or None for all, got {shown(targets)}")
        if self.punica_backend not in PUNICA_BACKENDS:
            raise ValueError(
                f"unknown punica backend {shown(self.punica_backend)} (punica_backend); use one of "
                f"{', '.join(PUNICA_BACKENDS)}"
            )
        require_one_of(EVICTION_POLICIES, eviction_policy=self.eviction_policy)
        require_int(0, lora_extra_vocab_size=self.lora_extra_vocab_size)
        require_at_most(LARGEST_EXTRA_VOCAB, lora_extra_vocab_size=self.lora_extra_vocab_size)
        for name in (
            "fully_sharded_loras",
            "bias_enabled",
            "enable_lora_bias",
            "enable_dora",
            "refuse_pickles",
        ):
            require_bool(**{name: getattr(self, name)})
        object.__setattr__(self, "bias_enabled", self.bias_enabled or self.enable_lora_bias)
        if self.long_lora_scaling_factors is not None:
            object.__setattr__(self, "long_lora_scaling_factors", self._checked_factors())

    def slot_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Of slots and adapters beside a model: "auto" is the model's."""
        return model_dtype if self.lora_dtype == "auto" else self.lora_dtype

    def backend_on(self, device: torch.device | str) -> str:
        """The punica backend that "auto" means there: the quickest."""
        if self.punica_backend != "auto":
            return self.punica_backend
        return "paged" if torch.device(device).type == "cuda" else "grouped"

    def on_device(self, device: torch.device | str) -> LoRAConfig:
        """The same with the number of slots that None means there, and the backend that is for so many.

        In pages an empty slot costs next to nothing. Only embeddings and heads have slots of one size beside them.
        """
        if self.max_loras is not None:
            return self
        slots, backend = SLOTS, self.punica_backend
        if self.backend_on(device) in PAGED_BACKENDS:
            slots = min(MOST_SLOTS, max(LEAST_SLOTS, MOST_SLOT_RANKS // self.max_lora_rank))
            backend = self.backend_on(device)
        return replace(self, max_loras=min(slots, self.max_cpu_loras or slots), punica_backend=backend)

    def _checked_factors(self) -> tuple[float, ...]:
        """Ascending, each once, without 1."""
        given = self.long_lora_scaling_factors
        factors = given if isinstance(given, list | tuple | set | frozenset) else [None]
        # Frequencies that a dict scales apart mean nothing where its factor is 1; with another one they are no linear
        # scaling.
        factors = [1.0 if isinstance(f, dict) and f.get("factor") == 1 else f for f in factors]
        if not all(is_real(f) and 1 <= f <= LARGEST_FACTOR for f in factors):
            raise ValueError(
                f"long_lora_scaling_factors must be numbers of at least 1, at most {LARGEST_FACTOR}, got "
                f"{shown(given)}"
            )
        return tuple(sorted({float(factor) for factor in factors} - {1.0}))


@dataclass(frozen=True)
class ModelConfig:
    """Which base model, in which precision, with how long a context. vLLM: `ModelConfig`.

    model           a Hugging Face folder: config.json and safetensors. A path of pathlib becomes its text
    dtype           "auto" = the checkpoint's on a GPU; float32 on a CPU, where it is the fastest.
                    `EngineConfig`, which knows the device, settles it
    max_model_len   longest prompt plus answer in tokens; None = what the model was made for
    load_format     "auto" = safetensors; "dummy" = random weights by `seed`, and config.json is all there must be
    skip_tokenizer_init  no tokenizer: prompts come as token ids and answers have no text
    enforce_eager   no CUDA graphs
    quantization    "torchao" = the linears of the blocks in int8, weights only (its Int8WeightOnlyConfig), as they are
                    loaded. Embeddings, head, router and experts stay in `dtype`. None = nothing is quantized
    batch_invariant  a request's logits have the same bits whatever else is in its batches; see docs/architecture.md
    position_factor  how many times the model's positions a context may have: the largest rotary factor of adapters
    chat_template   what makes a prompt of a conversation: a file, or the Jinja template itself; None = the tokenizer's.
                    It becomes the template
    max_logprobs    the most logprobs a request may ask for beside each token; -1 = as many as there are tokens. Each
                    costs time in steps that others wait for, too
    """

    model: str | os.PathLike[str]
    dtype: str | torch.dtype = "auto"
    max_model_len: int | None = None
    seed: int = 0
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    quantization: str | None = None
    batch_invariant: bool = False
    position_factor: float = 1.0
    max_logprobs: int = 20
    chat_template: str | os.PathLike[str] | None = None
    architecture: ModelArchitecture = field(init=False)

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            require_int(1, max_model_len=self.max_model_len)
        require_int(-1, max_logprobs=self.max_logprobs)
        require_int(0, seed=self.seed)
        for name in ("skip_tokenizer_init", "enforce_eager", "batch_invariant"):
            require_bool(**{name: getattr(self, name)})
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(
                f"load_format {shown(self.load_format)} is not supported; use one of {', '.join(LOAD_FORMATS)}"
            )
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        require_text(model=self.model)
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", read_template(self.chat_template))
        folder = Path(self.model).expanduser()
        if not is_folder(folder):
            raise FileNotFoundError(f"model folder {shown(self.model)} does not exist")
        architecture = ModelArchitecture.from_folder(folder)
        max_model_len = architecture.resolve_max_model_len(self.max_model_len, self.position_factor)
        object.__setattr__(self, "model", str(folder))
        object.__setattr__(self, "architecture", architecture)
        object.__setattr__(self, "max_model_len", max_model_len)
        if self.dtype != "auto":
            object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        if self.batch_invariant:
            check_batch_invariant(self.quantization, architecture)
        if self.quantization is not None:
            check_quantization(self.quantization, self.dtype)

    def on_device(self, device: str) -> ModelConfig:
        """The same with the dtype that "auto" means there."""
        if self.dtype != "auto":
            return self
        on_cpu = torch.device(device).type == "cpu"
        return replace(self, dtype=torch.float32 if on_cpu else self.architecture.dtype)

    def get_vocab_size(self) -> int:
        return self.architecture.vocab_size


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. vLLM: `CacheConfig`.

    block_size      tokens a block
    num_blocks      blocks in all; None = what the memory holds, and no more than the engine can use
    memory_bytes    memory for keys and values when num_blocks is None. None = 1 GiB on a CPU, beside weights and
                    slots. On a GPU it is what these and the largest step leave of `gpu_memory_utilization`
    gpu_memory_utilization  share of the GPU's memory that the engine may come to use, in (0, 1]
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        require_int(1, block_size=self.block_size)
        for name in ("num_blocks", "memory_bytes"):
            if getattr(self, name) is not None:
                require_int(1, **{name: getattr(self, name)})
        share = self.gpu_memory_utilization
        if not is_real(share) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be a number in (0, 1], got {shown(share)}")
        require_bool(enable_prefix_caching=self.enable_prefix_caching)


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold. vLLM: `SchedulerConfig`.

    max_num_seqs            requests running at once
    max_num_batched_tokens  tokens a step, prompts and answers together; longer prompts go in chunks
    max_lora_wait_steps     steps a request may be passed over for want of a slot before it is served next
    async_scheduling        launch a step before the tokens of the one before are read, where steps are CUDA graphs
    policy                  who is asked first, of SCHEDULING_POLICIES; see `minivllm.policies.scheduling`
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_lora_wait_steps: int = 96
    async_scheduling: bool = True
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_lora_wait_steps"):
            require_int(1, **{name: getattr(self, name)})
        require_bool(async_scheduling=self.async_scheduling)
        require_one_of(SCHEDULING_POLICIES, scheduling_policy=self.policy)


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes, a device each, share every layer. vLLM: `ParallelConfig`.

    disable_custom_all_reduce   NCCL takes all sums and gathers, also those that GPUs could take in each other's memory
    """

    tensor_parallel_size: int = 1
    disable_custom_all_reduce: bool = False

    def __post_init__(self) -> None:
        require_int(1, tensor_parallel_size=self.tensor_parallel_size)
        require_bool(disable_custom_all_reduce=self.disable_custom_all_reduce)


@dataclass(frozen=True)
class EngineConfig:
    """All of the above. vLLM: `VllmConfig`.

    threads   CPU threads that a step computes on; None = OMP_NUM_THREADS if that is set, else as many as are fastest
    """

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora_config: LoRAConfig | None = None
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None:
            require_int(1, threads=self.threads)
            require_at_most(LARGEST_THREADS, threads=self.threads)
        object.__setattr__(self, "device", parse_device(self.device))
        object.__setattr__(self, "model_config", self.model_config.on_device(self.device))
        size = self.parallel_config.tensor_parallel_size
        self.model_config.architecture.refuse_uneven_shares(size)
        if self.lora_config is not None:
            lora_config = self._with_a_and_b_apart(self.lora_config).on_device(self.device)
            slot_dtype = lora_config.slot_dtype(self.model_config.dtype)
            object.__setattr__(self, "lora_config", replace(lora_config, lora_dtype=slot_dtype))
        if self.model_config.batch_invariant:
            check_one_order(self.device, size)
            if self.lora_config is not None:
                object.__setattr__(self, "lora_config", replace(self.lora_config, punica_backend="invariant"))

    def _with_a_and_b_apart(self, lora_config: LoRAConfig) -> LoRAConfig:
        """The same with a backend that uses A and B apart, which ranks that share out both do between two meetings.

        ValueError if "paged" was asked for, and ranks cannot have equal parts of each page.
        """
        size, rank = self.parallel_config.tensor_parallel_size, lora_config.max_lora_rank
        if size == 1 or not lora_config.fully_sharded_loras:
            return lora_config
        if lora_config.punica_backend == "paged" and (PAGE_RANKS % size or rank % PAGE_RANKS):
            raise ValueError(
                f"punica_backend 'paged' has {PAGE_RANKS} ranks in a page, which processes share out with "
                f"fully_sharded_loras: tensor_parallel_size {size} must divide them, and they max_lora_rank {rank}; "
                "use auto or triton"
            )
        if lora_config.punica_backend == "auto" and torch.device(self.device).type == "cuda":
            return replace(lora_config, punica_backend="triton")
        return lora_config


# ---- names of dtypes and devices ------------------------------------------------------------------------------


def parse_dtype(dtype: str | torch.dtype, option: str = "dtype") -> torch.dtype:
    """A torch dtype from its name; ValueError lists the names there are."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown {option} {shown(dtype)}; use one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def read_template(given: str | os.PathLike[str]) -> str:
    """A Jinja template, or what is in the file that has one. FileNotFoundError where there is no such file."""
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    require_text(chat_template=text)
    if set("{}\n") & set(text):
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileNotFoundError(f"chat template {shown(text)} cannot be read: {error}") from error


def parse_device(device: str | torch.device) -> str:
    """Where to run: "cpu", "cuda" or "cuda:N"; "auto" is "cuda" where there is a GPU, else "cpu".

    ValueError for another kind of device, or for a GPU that is not there.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"device {shown(device)} is not supported; use auto, cpu, cuda or cuda:N")
    if parsed.type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise ValueError(f"device '{device}' was asked for but PyTorch finds no CUDA GPU; use cpu or auto")
    if parsed.index is not None and parsed.index >= torch.cuda.device_count():
        raise ValueError(
            f"device '{device}' was asked for but there are only {torch.cuda.device_count()} GPUs, "
            "counted from cuda:0"
        )
    return str(parsed)


# ---- what cannot be asked of a base model ----------------------------------------------------------------------


def check_quantization(quantization: str, dtype: str | torch.dtype) -> None:
    """ValueError for what torchao cannot do, ModuleNotFoundError where it is missing."""
    if quantization != "torchao":
        raise ValueError(
            f"quantization {shown(quantization)} is not supported; use torchao, or None for the weights as stored"
        )
    # It multiplies by the int8 numbers before it scales, and so leaves float16's range; float64 it does not know.
    if dtype in (torch.float16, torch.float64):
        raise ValueError(
            f"quantization 'torchao' computes in float32 or bfloat16, but the dtype is {dtype}; "
            "pass --dtype bfloat16 or float32"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError(
            "quantization 'torchao' needs the package torchao, which is not installed; "
            f"run `pip install '{TORCHAO_REQUIREMENT}'`"
        )


def check_batch_invariant(quantization: str | None, architecture: ModelArchitecture) -> None:
    """ValueError for what has no kernel that sums in one order."""
    if quantization is not None:
        raise ValueError(f"batch_invariant does not go with quantization {quantization!r}; leave one out")
    if architecture.num_experts:
        raise ValueError(
            f"batch_invariant does not know experts, but {architecture.architecture} has "
            f"{architecture.num_experts} of them in a layer; leave it out"
        )


def check_one_order(device: str, tensor_parallel_size: int) -> None:
    """ValueError for where `batch_invariant` cannot be kept."""
    # The variable is Triton's own, for its interpreter: slow, and enough for tests.
    if torch.device(device).type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"batch_invariant needs a GPU, but the device is {device}; leave it out")
    if tensor_parallel_size > 1:
        raise ValueError(
            f"batch_invariant does not go with tensor_parallel_size {tensor_parallel_size}: sums over ranks have "
            "another order; leave one out"
        )
