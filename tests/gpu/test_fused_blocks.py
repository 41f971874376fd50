"""Fused blocks stand in the places of a model's own: names and weights stay, and so do its answers."""

import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.gpu.fused import FusedLlamaModel, fuse
from minivllm.layers.linear import RowParallelLinear
from minivllm.lora.layers.linear import RowParallelLinearWithLoRA
from minivllm.lora.wrapping import from_layer, replace_submodule
from minivllm.models.llama import LlamaModel
from minivllm.models.registry import get_model
from tests.oracles.peft import reference_logits
from tests.tools.device import DEVICE
from tests.worlds.models import PagedRequests, token_ids, transformers_model

VARIANTS = ["llama-llama3-rope", "qwen3-wide-heads", "mixtral"]
STEPS = [[(0, 5), (1, 1)], [(0, 4), (2, 9)], [(2, 5)]]


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


def loaded(variant, folder):
    transformers_model(variant).save_pretrained(folder)
    return get_model(folder, torch.float32, DEVICE, pack=False)


def test_modules_and_weights_keep_their_names(variant, tmp_path):
    model = loaded(variant, tmp_path)
    names, weights = [name for name, _ in model.named_modules()], model.state_dict()

    fused = fuse(model, layer_kernels=True)

    assert fused is model and type(model.model) is FusedLlamaModel
    assert sorted(name for name, _ in model.named_modules()) == sorted(names)
    assert {name: w.data_ptr() for name, w in model.state_dict().items()} == {
        name: w.data_ptr() for name, w in weights.items()
    }


def test_layers_that_were_wrapped_before_are_those_that_run(tmp_path):
    model, name = loaded("llama-llama3-rope", tmp_path), "model.layers.1.mlp.down_proj"
    base = model.get_submodule(name)
    assert type(base) is RowParallelLinear
    wrapped = replace_submodule(model, name, from_layer(base, 2, LoRAConfig(4, 2), []))

    fuse(model)

    assert model.get_submodule(name) is wrapped and type(wrapped) is RowParallelLinearWithLoRA


@pytest.mark.parametrize("layer_kernels", [False, True], ids=["PyTorch's layers", "kernels"])
def test_logits_are_those_of_transformers(variant, tmp_path, layer_kernels):
    texts = [token_ids(n, seed=n) for n in (9, 1, 14)]
    expected = [reference_logits(transformers_model(variant), text, torch.float64) for text in texts]
    model = fuse(loaded(variant, tmp_path), layer_kernels)

    for found, reference in zip(PagedRequests(model, texts).run(STEPS), expected, strict=True):
        assert (found.cpu().double() - reference).norm() < 2e-6 * reference.norm()


def test_without_fused_blocks_a_model_is_made_of_its_own(tmp_path):
    assert type(loaded("llama-llama3-rope", tmp_path).model) is LlamaModel
