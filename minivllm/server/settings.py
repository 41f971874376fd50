"""The options of a server. Stands for a part of vllm/entrypoints/openai/cli_args.py (v0.22.1)."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from minivllm.lora.request import LoRARequest

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class ServerSettings:
    """Names, keys and limits of one server.

    model_name           name of the base model in requests
    adapters             served from the start, each under its name
    lora_root            folder of the adapters that may be loaded or resolved later; None = none
    allow_runtime_lora   whether requests may load, unload and pin adapters
    api_keys             each opens everything; () = requests need no key
    adapter_keys         adapter -> a key that opens this adapter alone; needs `api_keys`
    allowed_origins      of pages in browsers (CORS): `https://page.example`, or `*`
    allowed_hosts        names that the header Host may have; () = any. A page of another site, whose name somebody has
                         led to this server's address (DNS rebinding), sends its own
    log_requests         whether the access log has a line for each request
    drain_seconds        for running requests after a SIGTERM
    max_body_bytes, max_header_bytes   of one request
    max_concurrency      concurrent requests
    max_prompts          in one request for completions
    read_seconds         until a request's body must have been received
    write_seconds        after which a client that reads nothing is cut off
    most_labels          adapters with metrics of their own; all others share the label "other"

    ValueError for names that are taken or cannot be printed, keys that cannot be sent, and limits below 1.
    """

    model_name: str
    adapters: tuple[LoRARequest, ...] = ()
    lora_root: str | None = None
    allow_runtime_lora: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    adapter_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    log_requests: bool = True
    drain_seconds: float = 30.0
    max_body_bytes: int = 4 * 2**20
    max_header_bytes: int = 32 * 2**10
    max_concurrency: int = 512
    max_prompts: int = 64
    read_seconds: float = 30.0
    write_seconds: float = 60.0
    most_labels: int = 200

    def __post_init__(self) -> None:
        names = [self.model_name, *(adapter.lora_name for adapter in self.adapters)]
        for name in names:
            check_printable(name)
            if names.count(name) > 1:
                raise ValueError(f"two models are called '{name}'; give each a name of its own")
        if self.lora_root is not None and not os.path.isdir(self.lora_root):
            raise FileNotFoundError(f"adapter folder '{self.lora_root}' does not exist")
        if self.allow_runtime_lora and self.lora_root is None:
            raise ValueError(
                "adapters may be loaded at run time from below one folder only; pass --lora-root"
            )
        self._check_keys()
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"'{origin}' is no origin of web pages; give one like https://page.example, or *"
                )
        for name in ("max_body_bytes", "max_header_bytes", "max_concurrency", "max_prompts", "most_labels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def _check_keys(self) -> None:
        if self.adapter_keys and not self.api_keys:
            raise ValueError(
                "keys of single adapters need a key that opens everything, to manage the server with; pass --api-key"
            )
        for key in (*self.api_keys, *self.adapter_keys.values()):
            if not key:
                raise ValueError("an API key must not be empty")
            if key != key.strip() or not (key.isascii() and key.isprintable()):
                raise ValueError(
                    "no header can hold this API key; use ASCII characters, and no blanks around them"
                )


def check_printable(name: str) -> None:
    """ValueError for a model's name with characters that cannot be printed, as in a log."""
    if not name.isprintable():
        raise ValueError(f"the name {name[:100]!a} has characters that cannot be printed; give another one")
