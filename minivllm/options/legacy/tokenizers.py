"""Tokenizers that adapters bring, as `get_lora_tokenizer` and `TokenizerGroup` of vLLM up to 0.10 had them (vllm/
transformers_utils/)."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.errors import LONGEST_NAME, is_real, one_sentence, recoverable
from minivllm.lora.lru_cache import LRUCache
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.text.detokenizer import fast_backend

# The largest tokenizers of today take 35 MB, their configs, with 6,000 added tokens, 1.2 MB.
TOKENIZER_BYTES = 40 * 2**20
TOKENIZER_CONFIG_BYTES = 4 * 2**20

# What transformers looks for beside a tokenizer, be it the model's.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt")
TOKENIZER_CONFIGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


class TokenizerFile(NamedTuple):
    """The tokenizer in an adapter's folder as it was when the adapter was read: what it was read with.

    folder                the real one, free of links
    inode, size, changed  of its tokenizer.json: another file of that name is another tokenizer
    """

    folder: str
    inode: int
    size: int
    changed: int

    @classmethod
    def find(cls, folder: Path) -> "TokenizerFile | None":
        """None where the folder brings no tokenizer."""
        if not (path := folder / "tokenizer.json").is_file():
            return None
        found = path.stat()
        return cls(os.path.realpath(folder), found.st_ino, found.st_size, found.st_mtime_ns)


class AdapterTokenizers:
    """Tokenizers that adapters bring. Each takes megabytes, so few are kept: as many as memory has adapters, and one.

    That is enough for the adapters in memory and the last one asked for. Others are read again when they are asked for.
    """

    def __init__(self, manager: LRUCacheLoRAModelManager) -> None:
        self._manager = manager
        self._kept: LRUCache[Any] = LRUCache(manager.capacity + 1)

    def get(self, adapter_name: str, file: TokenizerFile) -> Any:
        """An adapter's tokenizer. The first to go is that of an adapter that has left memory.

        ValueError as in `load_tokenizer`.
        """
        if file not in self._kept:
            in_memory = self._manager.list_adapters().values()
            spare = {lora.beside.get("tokenizer_file") for lora in in_memory}
            self._kept.put(file, load_tokenizer(adapter_name, file.folder), spare)
        self._kept.touch(file)
        return self._kept[file]


def load_tokenizer(adapter_name: str, folder: str) -> Any:
    """The tokenizer in an adapter's folder. No code that the folder brings is run.

    ValueError names the adapter if it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        _refuse_large_files(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _refuse_what_cannot_encode(tokenizer)
    # The tokenizers library raises nothing narrower, and a panic of its Rust is no Exception.
    except BaseException as error:
        recoverable(error)
        name = one_sentence(adapter_name, LONGEST_NAME)
        raise ValueError(
            one_sentence(f"adapter '{name}': the tokenizer in '{folder}' cannot be read: {error}")
        ) from error
    return tokenizer


def _refuse_large_files(folder: str) -> None:
    """ValueError names a file that transformers would read with the tokenizer, if it is too large or no plain file."""
    templates = Path(folder, "additional_chat_templates").glob("*.jinja")
    for path in (*(Path(folder, name) for name in (*VOCABULARIES, *TOKENIZER_CONFIGS)), *templates):
        if not os.path.lexists(path):
            continue
        if not path.is_file():
            raise ValueError(f"{path.name} is no plain file")
        most = TOKENIZER_BYTES if path.name in VOCABULARIES else TOKENIZER_CONFIG_BYTES
        if (size := path.stat().st_size) > most:
            raise ValueError(f"{path.name} has {size} bytes, at most {most} are read")


def _refuse_what_cannot_encode(tokenizer: Any) -> None:
    """A tokenizer may be read, and yet be of no use, or fail at its first text."""
    fast_backend(tokenizer)
    longest = tokenizer.model_max_length
    if not is_real(longest):
        raise ValueError(f"model_max_length must be a number, got {longest!r}")
    tokenizer("a")
