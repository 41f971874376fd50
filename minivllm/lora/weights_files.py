"""The files that an adapter's tensors lie in. Stands for the reading in vllm/lora/lora_model.py (v0.22.1)."""

import io
import os
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

# PEFT's file names, in the order we prefer them: safetensors cannot run code.
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# Embeddings of tokens that an adapter adds: vLLM's name, up to 0.10; PEFT has none for them.
NEW_EMBEDDINGS_FILES = ("new_embeddings.safetensors", "new_embeddings.bin")


def find_weights_file(lora_dir: str) -> Path:
    """The adapter's weights in a folder, safetensors first. FileNotFoundError says what was looked for."""
    path = _first_file(lora_dir, WEIGHT_FILES)
    if path is None:
        raise FileNotFoundError(f"'{lora_dir}' has no weights file ({', '.join(WEIGHT_FILES)})")
    return path


def find_new_embeddings_file(lora_dir: str) -> Path | None:
    """The embeddings of the tokens that the adapter adds, safetensors first; None where it adds none."""
    return _first_file(lora_dir, NEW_EMBEDDINGS_FILES)


def _first_file(folder: str, names: tuple[str, ...]) -> Path | None:
    return next((Path(folder, name) for name in names if os.path.isfile(os.path.join(folder, name))), None)


def read_weights(path: Path, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    """All tensors of a weights file, in the order of names.

    shapes_only   tensors on the "meta" device: of a safetensors file, only the header is read

    ValueError names the file when it cannot be read, is damaged, cut short, or would need to run code.
    """
    read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
    try:
        tensors = read(path, shapes_only)
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error}") from error
    return {name: tensors[name].to("meta" if shapes_only else "cpu") for name in sorted(tensors)}


def _read_safetensors(path: Path, shapes_only: bool) -> dict[str, torch.Tensor]:
    try:
        if shapes_only:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name).to("meta") for name in file.keys()}  # noqa: SIM118 (no dict)
        # Not safe_open: its tensors are views of the file, so that writing over it would change the adapter that
        # is being served, and cutting it short would kill the process.
        return safetensors.torch.load(path.read_bytes())
    # All but the first: a dtype that torch does not have, or has no way to fill.
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"'{path}' is not a readable safetensors file: {error}") from error


def _read_pickle(path: Path, shapes_only: bool) -> dict[str, torch.Tensor]:
    """With `weights_only`, so that nothing in the file can run. All of it is read, also for the shapes."""
    data = io.BytesIO(path.read_bytes())
    try:
        tensors = torch.load(data, map_location="cpu", weights_only=True)
    # Damaged bytes can raise anything. torch's own text is left out: it tells how to load the file regardless.
    except Exception as error:
        raise ValueError(
            f"'{path}' is damaged or holds more than plain tensors; save the adapter as safetensors"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise ValueError(f"'{path}' does not hold a dict of tensors by name; save the adapter as safetensors")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not _is_plain(tensor):
            raise ValueError(f"'{path}': {name} is not a plain tensor; save the adapter as safetensors")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Dense numbers, all of them in the file: a pickle can also hold views larger than what they show."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.untyped_storage().nbytes() >= tensor.nbytes
    )
