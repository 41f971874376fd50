"""Tiny sparse models, adapters for their experts in every format, and what transformers answers with them.

An adapter that PEFT made is asked of PEFT. One that older trainers made, with a linear for each part of each expert, is
merged by hand into transformers' weights: PEFT's own conversion of those is off by sqrt(2) for gate and up with rsLoRA.
"""

import json
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.oracles.peft import Oracle
from tests.worlds.engines import TinyWorld, made_once
from tests.worlds.models import transformers_model

MIXTRAL, QWEN = "mixtral", "qwen3-moe-a-dense-layer"
GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "gate.weight"
# What PEFT is asked for. They differ in what they adapt, so in the names of their tensors, and in rank and scaling.
PARAMETERS = {
    "both": {"r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": [GATE_UP, DOWN]},
    "gate and up": {
        "r": 5,
        "lora_alpha": 9,
        "use_rslora": True,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": [GATE_UP],
    },
    "down": {
        "r": 2,
        "lora_alpha": 5,
        "target_modules": ["k_proj"],
        "target_parameters": ["down_proj", ROUTER],
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": [DOWN, ROUTER, GATE_UP],
        "rank_pattern": {"experts.gate_up_proj": 2, "gate.weight": 1, "down_proj": 6},
        "alpha_pattern": {r"layers.0.mlp.experts.down_proj": 11, "mlp.gate.weight": 3, "experts": 99},
    },
    "router": {"r": 3, "lora_alpha": 4, "target_modules": ["gate"]},
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
}


@dataclass
class OldAdapter:
    """An adapter with a linear for each part of each expert, as trainers saw them before transformers 5.

    names        of w1, w2 and w3
    experts      numbers of those that have adapters; None = all
    parts        of w1, w2 and w3, which have any
    ranks        regular expression for a module's name -> its rank, where it is not r; alphas likewise
    """

    names: tuple[str, str, str] = ("w1", "w2", "w3")
    block: str = "block_sparse_moe"
    r: int = 3
    lora_alpha: float = 7.0
    use_rslora: bool = False
    experts: list[int] | None = None
    parts: tuple[int, ...] = (0, 1, 2)
    router: bool = True
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)

    def _of(self, name: str, pattern: dict, default: float) -> float:
        return next((value for key, value in pattern.items() if re.search(rf"\b{key}$", name)), default)

    def scaling(self, name: str) -> float:
        rank = self._of(name, self.ranks, self.r)
        return self._of(name, self.alphas, self.lora_alpha) / (rank**0.5 if self.use_rslora else rank)

    def save(self, folder: Path, model: torch.nn.Module, seed: int) -> Path:
        """Random weights for transformers' model, which is only asked for its shapes."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, (height, width) in self._modules(model).items():
            rank = self._of(name, self.ranks, self.r)
            for side, shape in (("A", (rank, width)), ("B", (height, rank))):
                weight = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = weight
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "use_rslora": self.use_rslora,
            "target_modules": sorted({name.rpartition(".")[2] for name in self._modules(model)}),
            "rank_pattern": self.ranks,
            "alpha_pattern": self.alphas,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    def _modules(self, model: torch.nn.Module) -> dict[str, tuple[int, int]]:
        """Names of the linears -> (N, K)"""
        modules = {}
        for name, parameter in model.named_parameters():
            block = name.partition(".mlp.")[0] + f".{self.block}"
            if name.endswith(ROUTER) and self.router:
                modules[f"{block}.gate"] = tuple(parameter.shape)
            if name.endswith(DOWN):
                count, hidden, inner = parameter.shape
                shapes = (inner, hidden), (hidden, inner), (inner, hidden)
                for expert in range(count) if self.experts is None else self.experts:
                    for part in self.parts:
                        modules[f"{block}.experts.{expert}.{self.names[part]}"] = shapes[part]
        return modules

    @torch.no_grad()
    def merge(self, model: torch.nn.Module, folder: Path) -> torch.nn.Module:
        """W + scaling * B A for every linear of the adapter, in the places where transformers has them now."""
        tensors, parameters = load_file(folder / "adapter_model.safetensors"), dict(model.named_parameters())
        names = {name.rpartition(".lora_")[0] for name in tensors}
        for name in names:
            a, b = (tensors[f"{name}.lora_{side}.weight"] for side in "AB")
            module = name.removeprefix("base_model.model.").replace(self.block, "mlp")
            added = self.scaling(name) * b @ a
            if module.endswith(".gate"):
                parameters[f"{module}.weight"] += added
                continue
            experts, number, part = module.rsplit(".", 2)
            part = self.names.index(part)
            if part == 1:
                parameters[f"{experts}.down_proj"][int(number)] += added
            else:
                gate, up = parameters[f"{experts}.gate_up_proj"][int(number)].chunk(2)
                (gate if part == 0 else up).add_(added)
        return model


# What older trainers saved; {0}, {1} and {2} are what the model calls w1, w2 and w3.
OLD_ADAPTERS = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True, "r": 4, "lora_alpha": 9.0},
    "some experts": {"experts": [2, 0], "r": 2},
    "one expert": {"experts": [1], "parts": (1, 2), "r": 6, "use_rslora": True, "router": False},
    "gate alone": {"parts": (0,), "lora_alpha": 5.0, "router": False},
    "up and down": {"parts": (1, 2), "router": False},
    "patterns": {
        "use_rslora": True,
        "ranks": {r"experts\.0\.{0}": 8, r"{1}": 1, "gate": 2},
        "alphas": {r"layers\.0\..*\.{2}": 13, r"experts\.1\.{1}": 2, "gate": 1},
    },
}


def old_adapter(variant: str, name: str, other_names: bool = False) -> OldAdapter:
    """other_names: those of the other model for w1, w2 and w3"""
    is_mixtral = variant == MIXTRAL
    names = ("w1", "w2", "w3") if is_mixtral != other_names else ("gate_proj", "down_proj", "up_proj")
    block = "block_sparse_moe" if is_mixtral else "mlp"
    values = dict(OLD_ADAPTERS[name])
    for pattern in {"ranks", "alphas"} & values.keys():
        filled = {}
        for key, value in values[pattern].items():
            for i, part in enumerate(names):
                key = key.replace(f"{{{i}}}", part)
            filled[key] = value
        values[pattern] = filled
    return OldAdapter(names=names, block=block, **values)


class SparseWorld(TinyWorld):
    """A base model's folder and those of adapters for it: "parameters/..." by PEFT, "old/..." from older trainers."""

    def __init__(self, folder: Path, variant: str, **overrides: object) -> None:
        made_by_peft = {f"parameters/{name}": config for name, config in PARAMETERS.items()}
        super().__init__(folder, variant, made_by_peft, **overrides)
        self.old = {f"old/{name}": old_adapter(variant, name) for name in OLD_ADAPTERS}
        model = transformers_model(variant, **overrides)
        for seed, (name, adapter) in enumerate(self.old.items(), len(self.names)):
            adapter.save(self.path(name), model, seed)
        self.names += self.old

    def make_oracle(self, name: str | None) -> Oracle:
        if name not in self.old:
            return super().make_oracle(name)
        oracle = Oracle(self.base)
        self.old[name].merge(oracle.base, self.path(name))
        return oracle


sparse_world = partial(made_once, SparseWorld)
