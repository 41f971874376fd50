"""Hunt 8.5. The delta of every expert, by hand."""

import torch

from minivllm.lora.lora_weights import LoRALayerWeights, pack_moe


def test_packed_experts_keep_their_scaling():
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(4, 6, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(6)
    ]
    # rsLoRA: alpha 16 over the root of rank 4.
    experts = [LoRALayerWeights(f"experts.{i}", 4, 16, a, b, scaling=8.0) for i, (a, b) in enumerate(pairs)]

    packed = pack_moe(experts, "mlp.experts").optimize()

    for i, (a, b) in enumerate(pairs):
        expert, part = divmod(i, 3)
        delta = packed.lora_b[part][expert] @ packed.lora_a[part][expert]
        torch.testing.assert_close(delta, 8 * b @ a)
