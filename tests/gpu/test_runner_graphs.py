"""Decode steps from static buffers answer as eager steps do: padding, refills, the choice of graph.

Without a GPU a "captured" step just runs again, through Triton's interpreter, on the buffers it was made for.
"""

import pytest
from tiny_engine import greedy, run, tiny_world, tokens_of
from tiny_models import token_ids


class Rerun:
    """Stands in for a captured graph: the same launches on the same addresses, and a note of each."""

    def __init__(self, step):
        self.step = step
        self.calls = 0
        step()

    def __call__(self):
        self.calls += 1
        return self.step()


@pytest.fixture
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def graph_engine(world, **options):
    """An engine on the paged kernels, with stand-ins for graphs; float32, since the interpreter has no bfloat16."""
    options = {"dtype": "float32", "max_num_seqs": 6, "max_loras": 4, "device": "cpu", **options}
    engine = world.engine(**options)
    engine.runner.use_paged_attention = True
    engine.runner.capture_model(Rerun)
    return engine


def replays(engine):
    """(size, with LoRA) -> how often it was replayed, of those that were."""
    return {key: step.calls for key, step in engine.runner.decode_graphs._steps.items() if step.calls}


def add_mixed(engine, world, names, max_tokens=6):
    for i, name in enumerate(names):
        request = world.request(name)
        engine.add_request(str(i), token_ids(3 + 4 * i, i), greedy(max_tokens + i), lora_request=request)


@pytest.mark.parametrize("names", [[None, "qv", "all", None, "mlp"], [None] * 3, ["patterns"]], ids=str)
def test_padded_steps_give_the_tokens_of_each_request_alone(world, names):
    engine = graph_engine(world)

    add_mixed(engine, world, names)
    outputs = run(engine)

    assert replays(engine), "no step went through a graph"
    for i, name in enumerate(names):
        expected = world.oracle().greedy(name, token_ids(3 + 4 * i, i), 6 + i)
        assert tokens_of(outputs[str(i)]) == expected, f"{i}: {name}"
