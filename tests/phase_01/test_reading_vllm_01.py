"""What phases/01 asks about vLLM's reading of an adapter, answered by scenarios here."""

import pytest
import torch

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.peft_helper import PEFTHelper
from tests.worlds.adapter_folders import PREFIX, Q, good_config, good_tensors


def part(name, rank, alpha=6.0):
    return LoRALayerWeights(name, rank, alpha, torch.ones(rank, 5), torch.ones(4, rank))


def test_half_a_pair_is_refused_by_name_before_anything_is_scaled():
    tensors = good_tensors()
    del tensors[f"{PREFIX}{Q}.lora_B.weight"]

    with pytest.raises(ValueError, match=Q):
        LoRAModel.from_lora_tensors(1, tensors, PEFTHelper.from_dict(good_config()))


def test_a_packed_modules_rank_is_the_longest_of_its_parts():
    packed = PackedLoRALayerWeights.pack([part("q_proj", 1), None, part("v_proj", 3)])

    assert packed.rank == 3
