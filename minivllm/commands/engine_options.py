"""The engine's options as the commands have them, a row each. Stands for a part of vllm/engine/arg_utils.py (v0.22.1).

`EngineArgs` has the same names and the defaults: a command passes on only what was given. PyTorch is not imported here,
so that nonsense is refused before anything is loaded.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

Row = inspect.Parameter


def row(name: str, kind: Any, text: str, *flags: str, shown: Any = None, minimum: int | None = None) -> Row:
    """An option of the engine.   flags: where it is not called `--name`; shown: what holds where it is not given"""
    option = typer.Option(*flags, help=text, show_default=False if shown is None else str(shown), min=minimum)
    return Row(name, Row.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def switch(name: str) -> str:
    """Both flags of an option that is on or off."""
    return f"--{name}/--no-{name}"


# Where commands differ from `EngineArgs`: vLLM's 16 is for slots of one size, and most adapters have more.
DEFAULTS = {"max_lora_rank": 64}

ROWS = (
    row(
        "max_loras",
        int,
        "Slots: adapters in one batch. On a GPU as many as memory has room for.",
        shown="4, or --max-cpu-loras if that is fewer",
    ),
    row("max_lora_rank", int, "Largest rank of an adapter.", shown=64),
    row("max_cpu_loras", int, "Adapters kept in memory.", shown="--max-loras"),
    row("lora_dtype", str, "dtype of adapters.", shown="auto"),
    row("target_modules", list[str], "Adapt these modules alone.", "--lora-target-modules"),
    row(
        *("fully_sharded_loras", bool, "Processes share out both A and B of adapters."),
        "--fully-sharded-loras",
    ),
    row("bias_enabled", bool, "Serve adapters with a bias on B (PEFT's lora_bias).", "--enable-lora-bias"),
    row("enable_dora", bool, "Serve DoRA adapters (PEFT's use_dora).", "--enable-dora"),
    row("refuse_pickles", bool, "Serve no adapter whose weights are a .bin or .pt file.", "--refuse-pickles"),
    row("lora_extra_vocab_size", int, "The most tokens that an adapter may add.", shown=0),
    row(
        "long_lora_scaling_factors",
        str,
        "Comma-separated: rotary factors of adapters for longer contexts, e.g. 2.0,4.0.",
    ),
    row("eviction_policy", str, "Who leaves full slots, or memory: lru, lfu or gdsf.", shown="lru"),
    row(
        "scheduling_policy",
        str,
        "Who goes first: fcfs, adapter-affine, rank-aware, shortest-first or fair.",
        shown="fcfs",
    ),
    row("max_lora_wait_steps", int, "Steps that a request may wait for a slot before it is next.", shown=96),
    row("max_num_seqs", int, "Requests in one batch.", shown=64),
    row("max_num_batched_tokens", int, "Tokens of one step; longer prompts go in chunks.", shown=2048),
    row("max_model_len", int, "Longest prompt plus answer, in tokens.", shown="the model's"),
    row("max_logprobs", int, "The most logprobs of a token that a request may ask for.", shown=20),
    row(
        "gpu_memory_utilization",
        float,
        "Share of the GPU's memory that the engine may come to use.",
        shown=0.9,
    ),
    row(
        "kv_cache_memory_bytes", int, "Memory of the KV cache.", shown="1 GiB on a CPU, what is left on a GPU"
    ),
    row("num_kv_blocks", int, "Blocks of the KV cache.", "--num-kv-blocks", "--num-gpu-blocks-override"),
    row("block_size", int, "Tokens of one block.", shown=16),
    row(
        "enable_prefix_caching",
        bool,
        "Keep what prompts that begin alike have computed.",
        switch("enable-prefix-caching"),
        shown="on",
    ),
    row("device", str, "auto, cpu, cuda or cuda:N; auto is a GPU if there is one.", shown="auto"),
    row(
        *("dtype", str, "auto, float32, bfloat16, float16 or float64; auto is float32 on a CPU."),
        shown="auto",
    ),
    row(*("quantization", str), "torchao: the base model's linears in int8; adapters stay as they are."),
    row("load_format", str, "auto reads the weights; dummy draws random ones.", shown="auto"),
    row("chat_template", str, "A file with the Jinja template of chats.", shown="the tokenizer's"),
    row("skip_tokenizer_init", bool, "No tokenizer: prompts are token ids.", "--skip-tokenizer-init"),
    row(*("threads", int, "CPU threads."), minimum=1, shown="OMP_NUM_THREADS, or as many as are fastest"),
    row(
        "tensor_parallel_size",
        int,
        "Processes that share every layer, a GPU or a part of the CPU's cores each.",
        "--tensor-parallel-size",
        "-tp",
        minimum=1,
        shown=1,
    ),
    row(
        "disable_custom_all_reduce",
        bool,
        "All sums over GPUs are NCCL's, none a kernel's of our own.",
        "--disable-custom-all-reduce",
    ),
    row("enforce_eager", bool, "No CUDA graphs.", "--enforce-eager"),
    row(
        "async_scheduling",
        bool,
        "Launch a step before the tokens of the one before are read.",
        switch("async-scheduling"),
        shown="on",
    ),
    row("batch_invariant", bool, "Equal bits whatever else is in a batch (GPUs).", "--batch-invariant"),
    row(
        "punica_backend",
        str,
        "LoRA arithmetic: auto, loops, grouped, triton, paged or invariant.",
        "--punica",
        "--punica-backend",
        shown="auto",
    ),
    row(
        "seed",
        int,
        "Of whatever is random: weights of --load-format dummy, requests without a seed.",
        shown=0,
    ),
)
BY_NAME = {each.name: each for each in ROWS}


def takes_engine_options(*names: str, but: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Any]:
    """A decorator: a command has these options as well, all of them if none is named.

    Its parameter `engine` is what was given of them, as keywords of `EngineArgs`.
    """
    rows = [BY_NAME[name] for name in names] or [each for each in ROWS if each.name not in but]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**given: Any) -> None:
            engine = {each.name: given.pop(each.name) for each in rows}
            command(**given, engine=keywords(engine))

        own = [
            each.replace(kind=Row.KEYWORD_ONLY)
            for each in inspect.signature(command).parameters.values()
            if each.name != "engine"
        ]
        called.__signature__ = inspect.Signature([*own, *rows])
        return called

    return decorated


def keywords(given: dict[str, Any]) -> dict[str, Any]:
    """Options as `EngineArgs` takes them. ValueError for factors that are no numbers."""
    options = {name: DEFAULTS.get(name) if value is None else value for name, value in given.items()}
    if (text := options.get("long_lora_scaling_factors")) is not None:
        options["long_lora_scaling_factors"] = parse_factors(text)
    return {name: value for name, value in options.items() if value is not None}


def parse_factors(text: str) -> tuple[float, ...]:
    """`2.0,4.0` as numbers. ValueError for what is no number."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(
            f"--long-lora-scaling-factors '{text}' is not of the form 2.0,4.0 (numbers with commas between)"
        ) from None
