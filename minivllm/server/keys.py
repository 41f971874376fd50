"""API keys, and which models each permits.

Stands for `AuthenticationMiddleware` of vllm/entrypoints/openai/server_utils.py (v0.22.1).
"""

import hashlib
import hmac
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm.server.errors import ApiError, error_response
from minivllm.server.settings import ServerSettings

# The page at / shows nothing of the server by itself; it asks its user for a key.
OPEN = frozenset({"/health", "/ping", "/version", "/"})


@dataclass(frozen=True)
class Holder:
    """The holder of a key. adapters: the only ones that the key opens; None = everything"""

    adapters: frozenset[str] | None = None

    def may_use(self, model: str) -> bool:
        return self.adapters is None or model in self.adapters

    def check(self, model: str) -> None:
        """ApiError 403 for a model that this key does not open."""
        if not self.may_use(model):
            raise ApiError(403, f"this API key does not open the model '{model}'", "model")

    def check_manages(self) -> None:
        """ApiError 403 for the key of single adapters, where all adapters are shown or changed."""
        if self.adapters is not None:
            raise ApiError(403, "this API key opens single adapters only; this needs the server's key")


class Keys:
    """All keys, as digests, so that comparing takes the same time for any wrong key."""

    def __init__(self, settings: ServerSettings) -> None:
        self._masters = [_digest(key) for key in settings.api_keys]
        self._of_adapters = [(_digest(key), name) for name, key in settings.adapter_keys.items()]

    def holder(self, authorization: str) -> Holder | None:
        """The holder of a header `Bearer KEY`; None for an unknown key."""
        if not self._masters:
            return Holder()
        scheme, _, key = authorization.partition(" ")
        sent = _digest(key.strip() if scheme.lower() == "bearer" else "")
        # All are compared, also after one fits.
        masters = [hmac.compare_digest(sent, digest) for digest in self._masters]
        opened = [name for digest, name in self._of_adapters if hmac.compare_digest(sent, digest)]
        if any(masters):
            return Holder()
        return Holder(frozenset(opened)) if opened else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class KeyCheck:
    """A middleware: refuses requests without a known key; others get its `Holder` into their state."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent = [value for name, value in scope["headers"] if name == b"authorization"]
            holder = self.keys.holder(sent[0].decode("latin-1") if len(sent) == 1 else "")
            if holder is None and scope["path"] not in OPEN:
                response = error_response(401, "no valid API key was sent; send `Authorization: Bearer KEY`")
                return await response(scope, receive, send)
            scope["state"]["holder"] = holder
        return await self.app(scope, receive, send)
