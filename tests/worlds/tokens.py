"""Adapters that add tokens, and as their oracle a model that had them from the start: transformers with more rows
in both embeddings, PEFT on top.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.oracles.peft import Oracle
from tests.worlds.adapters import save_adapter
from tests.worlds.engines import TinyWorld
from tests.worlds.models import SIZES, token_ids

V, H = SIZES["vocab_size"], SIZES["hidden_size"]

# Adapters, by how many tokens they add. All use the same ids, V and those after it.
COUNTS = {"cats": 2, "dogs": 3, "wide ends": 3, "narrow ends": 2, "reads": 1, "plain": 0}
ENDS = {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}
ADAPTERS = {
    "cats": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "dogs": {"r": 8, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
    "wide ends": ENDS,  # trained when the tokens were there: A and B have them
    "narrow ends": ENDS,  # trained without them
    "reads": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
}


def new_embeddings(name: str) -> dict[str, torch.Tensor]:
    """Output embeddings are long, so that the tokens are produced; "reads" has none."""
    generator = torch.Generator().manual_seed(list(COUNTS).index(name))
    shape = COUNTS[name], H
    tensors = {"input_embeddings": torch.randn(shape, dtype=torch.float64, generator=generator)}
    if name != "reads":
        size = 1.5 if name.endswith("ends") else 0.6
        tensors["output_embeddings"] = size * torch.randn(shape, dtype=torch.float64, generator=generator)
    return tensors


class TokenSet(TinyWorld):
    """A base model and the adapters above, in vLLM's form: `new_embeddings.safetensors` beside the weights."""

    def __init__(self, folder: Path, variant: str) -> None:
        super().__init__(folder, variant, ADAPTERS)
        self.new = {name: new_embeddings(name) for name, count in COUNTS.items() if count}
        seed = self.names.index("wide ends")
        save_adapter(self.path("wide ends"), self.grown_base("wide ends"), seed, **ENDS)
        for name, tensors in self.new.items():
            save_file(tensors, self.path(name) / "new_embeddings.safetensors")

    def grown_base(self, name: str) -> Path:
        """The base model with an adapter's tokens: a folder of its own, untied, since the two ends differ."""
        from transformers import AutoModelForCausalLM

        folder = self.folder / "grown" / name
        if not folder.exists():
            model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float64)
            was_tied, head = model.config.tie_word_embeddings, model.lm_head.weight.detach().clone()
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(head)
            model.resize_token_embeddings(V + COUNTS[name], mean_resizing=False)
            tensors = self.new[name]
            with torch.no_grad():
                model.get_input_embeddings().weight[V:] = tensors["input_embeddings"]
                # Without output embeddings a tied model has the input's; an untied one never gets to them.
                rows = tensors.get("output_embeddings", tensors["input_embeddings"] if was_tied else 0)
                model.lm_head.weight[V:] = rows
            model.save_pretrained(folder)
        return folder

    def make_oracle(self, name: str | None) -> Oracle:
        if not COUNTS.get(name):
            return super().make_oracle(name)
        untied = self.variant == "llama-llama3-rope"
        oracle = (MuteTokens if name == "reads" and untied else Oracle)(self.grown_base(name))
        oracle.load(name, self.widened(name) if name == "narrow ends" else self.path(name))
        return oracle

    def widened(self, name: str) -> Path:
        """The adapter as PEFT wants it on the grown model: zeros for what A and B lack of its tokens."""
        folder = self.folder / "widened" / name
        shutil.copytree(self.path(name), folder, dirs_exist_ok=True)
        tensors = load_file(folder / "adapter_model.safetensors")
        for key, tensor in list(tensors.items()):
            if key.endswith("embed_tokens.lora_embedding_A"):
                tensors[key] = torch.cat([tensor, tensor.new_zeros(len(tensor), COUNTS[name])], dim=1)
            elif key.endswith("lm_head.lora_B.weight"):
                tensors[key] = torch.cat([tensor, tensor.new_zeros(COUNTS[name], tensor.shape[1])])
            elif key.endswith("base_layer.weight"):
                del tensors[key]
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    def workload(self, seed: int = 0, rows: int = 3, adapters: list[str] | None = None) -> list[tuple]:
        """As usual; every adapter gets its own tokens in half of its prompts."""
        pairs = super().workload(seed, rows, adapters)
        return [
            (name, with_new(prompt, COUNTS[name], i) if name and COUNTS[name] and i % 2 else prompt)
            for i, (name, prompt) in enumerate(pairs)
        ]


class MuteTokens(Oracle):
    """An oracle of tokens that can be read and never said."""

    def logits(self, name, token_ids):
        logits = super().logits(name, token_ids).clone()
        logits[..., V:] = -torch.inf
        return logits


def with_new(prompt: list[int], count: int, seed: int) -> list[int]:
    """The prompt with added tokens in every third place."""
    return [
        V + (seed + i) % count if i % 3 == 0 else token for i, token in enumerate(prompt or token_ids(1, 0))
    ]
