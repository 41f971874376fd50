"""Tiny random models of every supported kind: folders, a tokenizer, a paged cache to run ours in chunks."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minivllm.layers.attention import Attention, AttentionMetadata

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Each differs from the next in what a model of this family can differ in.
VARIANTS = {
    "llama-llama3-rope": {"model_type": "llama", "num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope-biases-tied": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5},
    },
    "mistral-one-kv-head": {
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "sliding_window": 200,
        "rms_norm_eps": 0.02,
    },
    "qwen2-tied": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3-wide-heads": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 20},
    "phi3-fused": {"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 220, "pad_token_id": 0},
    "mixtral": {
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe-a-dense-layer": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
}


def every_expert(variant):
    """Overrides for `transformers_model`: each token runs all experts.

    Half precision now and then tips the choice between two experts that a token likes alike, which is no error.
    """
    experts = VARIANTS[variant].get("num_local_experts")
    return {"num_experts_per_tok": experts} if experts else {}


def transformers_model(variant, seed=0, **overrides):
    """A model of transformers, every parameter random, norms and biases too, so that none can be ignored."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**SIZES, **VARIANTS[variant], **overrides}
    config = AutoConfig.for_model(values.pop("model_type"), eos_token_id=2, bos_token_id=1, **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.data = noise * scale + (1.0 if "norm" in name else 0.0)
    return model


def token_ids(length, seed):
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], length).tolist()


class PagedRequests:
    """Texts run through one of our models piece by piece, their blocks scattered over a cache full of NaN.

    paged: by the GPU's kernels, or else by PyTorch's own attention
    """

    def __init__(self, model, texts, block_size=4, num_blocks=64, seed=0, paged=False):
        self.model = model
        self.paged = paged
        self.texts = texts
        self.done = [0] * len(texts)
        self.tables = [[] for _ in texts]
        self.block_size = block_size
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.dtype, self.device = model.model.norm.weight.dtype, model.model.norm.weight.device
        for layer in model.modules():
            if isinstance(layer, Attention):
                shape = layer.kv_cache_shape(num_blocks, block_size)
                layer.bind_kv_cache(torch.full(shape, float("nan"), dtype=self.dtype, device=self.device))

    def step(self, work):
        """Run (text number, new tokens) rows as one batch; the logits of each row's tokens, in that order."""
        ids, positions, query_lens, seq_lens = [], [], [], []
        for row, n in work:
            start, end = self.done[row], self.done[row] + n
            while len(self.tables[row]) * self.block_size < end:
                self.tables[row].append(self.free.pop())
            ids += self.texts[row][start:end]
            positions += range(start, end)
            query_lens.append(n)
            seq_lens.append(end)
            self.done[row] = end
        tables = [self.tables[row] for row, _ in work]
        rows = query_lens, seq_lens, tables, self.block_size
        if self.paged:
            from minivllm.gpu.paged_attention import PagedAttentionMetadata  # others run without that folder

            attn = PagedAttentionMetadata.build(*rows, 16, self.device)
        else:
            attn = AttentionMetadata.build(*rows, self.device, self.dtype)
        with torch.inference_mode():
            ids, positions = (torch.tensor(x, device=self.device) for x in (ids, positions))
            hidden = self.model(ids, positions, attn)
            return self.model.compute_logits(hidden).split(query_lens)

    def run(self, steps):
        """Run a list of steps; each text's logits, whole."""
        pieces = [[] for _ in self.texts]
        for work in steps:
            for (row, _), logits in zip(work, self.step(work), strict=True):
                pieces[row].append(logits)
        return [torch.cat(piece) for piece in pieces]


def save_base(
    folder: Path, variant: str = "llama-llama3-rope", dtype: torch.dtype = torch.float64, **overrides: object
) -> Path:
    """A tiny random model as a Hugging Face folder.   overrides: of its config"""
    transformers_model(variant, **overrides).to(dtype).save_pretrained(folder)
    return folder


def stretch_positions(base: Path, folder: Path, factor: float) -> Path:
    """The same model with linearly scaled positions: what an adapter for a longer context was trained on."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "linear", "rope_theta": config["rope_parameters"]["rope_theta"]}
    config["rope_parameters"] = {**rope, "factor": factor * config["rope_parameters"].get("factor", 1)}
    config["max_position_embeddings"] = int(config["max_position_embeddings"] * factor)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def character_tokenizer() -> object:
    """A fast tokenizer of transformers around `character_backend`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=character_backend(), pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def character_backend() -> Tokenizer:
    """For a vocabulary of 97: three special tokens, then the characters from space to `}`."""
    special = ["<pad>", "<s>", "</s>"]
    characters = ["Ġ", *map(chr, range(ord("!"), ord("}") + 1))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *characters])}, []))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
