"""From a folder to weights."""

from collections.abc import Iterator

import torch

from labs.demos.small import numbers, ones, weights
from minivllm.lora.lora_model import pair_up, to_weights
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.names import parse_fine_tuned_lora_name
from minivllm.lora.peft_helper import PEFTHelper


def demo_1_2() -> Iterator[str]:
    for name in (
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.mlp.up_proj.lora_B.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.mlp.up_proj.weight",
    ):
        try:
            module, is_a = parse_fine_tuned_lora_name(name)
            yield f"{name}\n  {'A' if is_a else 'B'} of {module}"
        except ValueError as error:
            yield f"{name}\n  refused: {error}"


def demo_1_3() -> Iterator[str]:
    for is_rs in (False, True):
        helper = PEFTHelper(
            8, 16, ["q_proj"], use_rslora=is_rs, alpha_pattern={"q_proj": 4, "layers.1.v_proj": 64}
        )
        rule = "rsLoRA: alpha / sqrt(rank)" if is_rs else "plain LoRA: alpha / rank"
        yield f"{rule}, alpha being 16, or what alpha_pattern says: {helper.alpha_pattern}"
        for module, rank in (
            ("layers.0.k_proj", 8),
            ("layers.0.k_proj", 2),
            ("layers.0.q_proj", 8),
            ("layers.1.v_proj", 8),
        ):
            yield f"  {module} of rank {rank}: B·A times {helper.scaling(module, rank):g}"


def demo_1_4() -> Iterator[str]:
    given = LoRALayerWeights("q_proj", 2, 16, ones(2, 3), ones(1, 2))
    before = given.lora_b
    yield f"read:      scaling {given.scaling:g}, B {numbers(given.lora_b)}"
    for time in ("optimized", "and again"):
        folded = given.optimize()
        yield f"{time}: scaling {folded.scaling:g}, B {numbers(folded.lora_b)}"
    yield f"the B that was read is {numbers(before)} still"


def demo_1_5() -> Iterator[str]:
    q, v = LoRALayerWeights("q_proj", 2, 8, ones(2, 3), ones(2, 2)), weights("v_proj", 4)
    packed = PackedLoRALayerWeights.pack([q, None, v])
    yield f"a slot needs room for rank {packed.rank}; named after {packed.module_name}"
    for name, part in zip("qkv", packed.parts):
        said = (
            "nothing"
            if part is None
            else f"rank {part.rank}, scaling left {part.scaling:g}, B {numbers(part.lora_b[0])} ..."
        )
        yield f"  {name}: {said}"


def demo_1_6() -> Iterator[str]:
    helper = PEFTHelper(4, 8, ["q_proj", "o_proj"])
    tensors = {
        "base_model.model.o_proj.lora_B.weight": torch.rand(5, 2),
        "base_model.model.q_proj.lora_A.weight": torch.rand(4, 3),
        "base_model.model.o_proj.lora_A.weight": torch.rand(2, 3),
        "base_model.model.embed_tokens.base_layer.weight": torch.rand(9, 3),
        "base_model.model.q_proj.lora_B.weight": torch.rand(6, 4),
    }
    yield f"{len(tensors)} tensors, in any order"
    helper.ranks = [2, 4]
    for name, found in to_weights(pair_up(tensors, helper), helper).items():
        yield f"  {name}: A {tuple(found.lora_a.shape)}, B {tuple(found.lora_b.shape)}, scaling {found.scaling:g}"
    del tensors["base_model.model.o_proj.lora_A.weight"]
    try:
        to_weights(pair_up(tensors, helper), helper)
        yield "an A is missing, and nobody minds"
    except ValueError as error:
        yield f"  without one A: {error}"
