"""What phases/03 asks about vLLM's arithmetic on a CPU, answered by scenarios here."""

import torch

from minivllm.lora.mapping import compute_runs
from minivllm.lora.ops.by_token import bgmv_shrink


def test_base_rows_are_a_run_for_unique_consecutive_and_none_here():
    token_slots = [2, 2, -1, 2]

    runs = compute_runs(token_slots)

    assert torch.unique_consecutive(torch.tensor(token_slots)).tolist() == [2, -1, 2]
    assert runs == [(2, slice(0, 2)), (2, slice(3, 4))]


def test_an_index_of_minus_one_is_the_last_slot_and_a_base_row_is_left_alone():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 6, generator=generator)
    lora_a = torch.randn(3, 4, 6, generator=generator)
    token_slots = torch.tensor([0, -1])
    output = torch.full((2, 4), 9.0)

    bgmv_shrink(x, lora_a, output, token_slots)

    assert torch.equal(lora_a[token_slots][1], lora_a[2]), "what a gather by these indices picks"
    assert torch.allclose(output[0], lora_a[0] @ x[0])
    assert (output[1] == 9).all()
