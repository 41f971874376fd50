"""What the layer benchmark works on: cases, traffic, and linears full of random adapters."""

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.options import model_folder
from minivllm.commands.random_adapter import linear_shapes
from minivllm.models.config import ModelArchitecture
from minivllm.simulate.traffic import zipf_shares

ZIPF_ALPHA = 1.2

# Case, mix, model: R 8 to 256, S 1 to 128, T 1 to 8192.
TABLE = (
    *(
        f"decode:{case} uniform llama-8b"
        for case in ("1:1:8", "1:8:16", "8:8:16", "32:1:16", "32:8:8", "32:8:16", "64:8:64", "64:32:16")
    ),
    *(
        f"decode:{case} uniform llama-8b"
        for case in ("16:4:256", "64:16:128", "64:64:8", "64:128:16", "128:128:16", "256:1:16", "256:32:16")
    ),
    *(
        f"decode:{case} llama-8b"
        for case in ("64:32:16 zipf", "512:64:16 zipf", "64:32:16 half", "64:32:128 ranks", "256:32:64 ranks")
    ),
    *(
        f"prefill:{case} uniform llama-8b"
        for case in (
            "512:1:16",
            "1024:32:8",
            "2048:8:16",
            "8192:8:16",
            "4096:4:64",
            "2048:24:32",
            "2048:4:256",
        )
    ),
    *(
        f"prefill:{case} llama-8b"
        for case in ("2048:8:16 zipf", "2048:8:16 half", "2048:8:16 ranks", "3000:8:128 ranks")
    ),
    *(
        f"{case} qwen-0.6b"
        for case in (
            *("decode:1:8:16 uniform", "decode:32:8:16 uniform", "decode:256:32:32 ranks"),
            *("prefill:1024:16:64 uniform", "prefill:4096:8:16 uniform"),
        )
    ),
    *(
        f"{case} llama-70b"
        for case in (
            *(
                "decode:1:8:16 uniform",
                "decode:32:8:16 uniform",
                "decode:64:32:16 zipf",
                "decode:64:8:64 uniform",
            ),
            *("prefill:1024:8:32 uniform", "prefill:4096:8:16 uniform"),
        )
    ),
)


@dataclass(frozen=True)
class Case:
    """phase:tokens:slots:rank, `decode:64:32:16` say."""

    phase: str
    tokens: int
    slots: int
    rank: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        phase, *numbers = text.split(":")
        if phase not in ("decode", "prefill") or len(numbers) != 3:
            raise ValueError(f"case '{text}' is not phase:tokens:slots:rank with phase decode or prefill")
        return cls(phase, *map(int, numbers))

    def __str__(self) -> str:
        return f"{self.phase}:{self.tokens}:{self.slots}:{self.rank}"

    def ranks(self, mix: str) -> list[int]:
        """Live rank of each slot: all the same, or for "ranks" by thirds whole, a half and a quarter, at least 8."""
        if mix != "ranks":
            return [self.rank] * self.slots
        return [max(min(8, self.rank), self.rank >> slot % 3) for slot in range(self.slots)]

    def token_slots(self, mix: str) -> torch.Tensor:
        """(T,) int32 slot of each row. A prompt's rows have one; there are two prompts a slot.

        "zipf": popularity falls with the slot; "half": every second request is base only
        """
        rng = np.random.default_rng(self.tokens * 7 + self.slots)
        requests = self.tokens if self.phase == "decode" else min(self.tokens, 2 * self.slots)
        shares = zipf_shares(self.slots, ZIPF_ALPHA if mix == "zipf" else 0)
        picks = rng.choice(self.slots, requests, p=shares)
        if mix == "half":
            picks[1::2] = -1
        edges = np.linspace(0, self.tokens, requests + 1).round().astype(int)
        return torch.from_numpy(picks.repeat(np.diff(edges))).to(torch.int32)


@dataclass(frozen=True)
class Linear:
    """One linear with slots full of adapters; see impls.py for the letters."""

    w: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    slices: list[int]

    @classmethod
    def random(
        cls, width: int, slices: list[int], ranks: list[int], rank: int, like: torch.Tensor
    ) -> "Linear":
        """Of `like`'s dtype and device; rows and columns past the live ranks are zero."""
        n = len(slices)
        w = torch.randn(sum(slices), width, dtype=like.dtype, device=like.device) * width**-0.5
        a = torch.randn(len(ranks), n, rank, width, dtype=like.dtype, device=like.device) * width**-0.5
        b = torch.randn(len(ranks), sum(slices), rank, dtype=like.dtype, device=like.device) * rank**-0.5
        for slot, live in enumerate(ranks):
            a[slot, :, live:] = 0
            b[slot, :, live:] = 0
        return cls(w, a.flatten(1, 2), b, slices)

    def expected(self, x: torch.Tensor, token_slots: torch.Tensor) -> torch.Tensor:
        """(T, N) in float64: base product, and B · A · x of each row's own slot."""
        y = x.double() @ self.w.double().t()  # (T, N)
        rank = self.b.shape[2]
        for slot in [slot for slot in token_slots.unique().tolist() if slot >= 0]:
            rows = token_slots == slot
            shrunk = (x[rows].double() @ self.a[slot].double().t()).split(rank, 1)  # n x (rows, R)
            parts = zip(shrunk, self.b[slot].double().split(self.slices))
            y[rows] += torch.cat([h @ part.t() for h, part in parts], 1)
        return y


def packed_linears(model: str) -> dict[str, tuple[int, list[int]]]:
    """Name of each linear of a layer as the engine packs them -> K, [N_i]."""
    shapes = linear_shapes(ModelArchitecture.from_folder(model_folder(model)))
    packs = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    return {name: (shapes[parts[0]][0], [shapes[part][1] for part in parts]) for name, parts in packs.items()}
