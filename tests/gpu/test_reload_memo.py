"""A reload under an unchanged mapping (INCIDENTS 2 and 7), on the Triton kernels, which keep live ranks apart."""

import shutil
from dataclasses import replace

import pytest

from minivllm import LoRARequest
from tests.tools.device import DEVICE
from tests.worlds.engines import greedy, run, tiny_world


@pytest.mark.parametrize("backend", ["triton", "paged"])
def test_an_adapter_read_again_with_another_rank_is_served_whole(tmp_path_factory, tmp_path, backend):
    world = tiny_world(tmp_path_factory)
    shutil.copytree(world.path("qv"), tmp_path / "a")
    lora = LoRARequest("a", 1, str(tmp_path / "a"))
    engine = world.engine(dtype="float32", device=DEVICE, punica_backend=backend)
    engine.add_request("x", [5], greedy(1), lora_request=lora)
    run(engine)

    shutil.rmtree(tmp_path / "a")
    shutil.copytree(world.path("all"), tmp_path / "a")
    engine.add_request("y", [5], greedy(1, logprobs=3), lora_request=replace(lora, load_inplace=True))
    answer = run(engine)["y"].outputs[0]

    expected = world.oracle().logits("all", [[5]])[0, -1].log_softmax(-1)
    for token, logprob in answer.logprobs[0].items():
        assert abs(logprob.logprob - float(expected[token])) < 1e-4
