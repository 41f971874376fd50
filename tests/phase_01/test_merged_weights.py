"""Adapters as PEFT saved them, against what PEFT merged, in float64: lab 1.6, without waiting for PEFT.

`test_peft_merged_weights.py` asks more of the PEFT that is installed.
"""

import pytest
import torch

from tests.oracles.recorded import FOLDER, MERGED, merged_by_peft
from tests.worlds.adapter_folders import load

FOLDERS = sorted((FOLDER / MERGED).iterdir())


@pytest.mark.lab("1.6")
@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_every_module_adds_what_peft_merged_and_there_are_no_others(folder):
    deltas = merged_by_peft(folder)

    lora = load(folder, dtype=torch.float64)

    assert lora.loras.keys() == deltas.keys()
    for name, delta in deltas.items():
        weights = lora.loras[name]
        product = weights.scaling * (weights.lora_b.double() @ weights.lora_a.double())
        torch.testing.assert_close(product, delta, rtol=0, atol=1e-12 * delta.abs().max().item())
        assert weights.rank == len(weights.lora_a) == torch.linalg.matrix_rank(delta)
    assert lora.rank == max(weights.rank for weights in lora.loras.values())
