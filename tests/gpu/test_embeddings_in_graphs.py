"""Adapters on embeddings and output, and stretched positions, in captured decode steps.

A captured step runs the same launches whatever the batch: slots of tokens and of sampled rows, ranks and rotary
tables are read from memory that the next step fills. Without a GPU a "captured" step just runs again, through
Triton's interpreter, on the buffers it was made for. The oracle is transformers + PEFT, one adapter at a time.
"""

import pytest

from minivllm import EngineArgs, LLMEngine, LoRARequest
from tests.oracles.peft import Oracle
from tests.tools.device import DEVICE
from tests.tools.nights import without_gpu_at_night
from tests.worlds.adapters import change_json, save_adapter
from tests.worlds.engines import OPTIONS, greedy, run, tokens_of
from tests.worlds.gpu import graph_steps, watch_replays
from tests.worlds.models import save_base, stretch_positions, token_ids

# The first three differ in what of the embeddings they adapt; "long" was trained at twice the context.
ADAPTERS = {
    "embedding": {"r": 8, "lora_alpha": 16, "target_modules": ["embed_tokens"]},
    "head": {"r": 3, "lora_alpha": 9, "target_modules": ["lm_head", "q_proj"]},
    "both": {
        "r": 5,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["embed_tokens", "lm_head", "up_proj"],
    },
    "neither": {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "down_proj"]},
    "long": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens"]},
}
POSITIONS = 64


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("llama-linear-rope-biases-tied", marks=pytest.mark.nightly_without_gpu),
        "qwen3-wide-heads",
    ],
)
def world(request, tmp_path_factory):
    """(folder, oracles by adapter): a tied and an untied model of 64 positions."""
    root = tmp_path_factory.mktemp("embeddings")
    base = save_base(root / "base", request.param)
    change_json(base / "config.json", max_position_embeddings=POSITIONS)
    for seed, (name, adapter) in enumerate(ADAPTERS.items()):
        save_adapter(root / name, base, seed, **adapter)
    change_json(root / "long" / "adapter_config.json", context_length=2 * POSITIONS)
    plain = Oracle(base)
    for name in ADAPTERS:
        if name != "long":
            plain.load(name, root / name)
    stretched = Oracle(stretch_positions(base, root / "stretched", 2))
    stretched.load("long", root / "long")
    return root, {None: plain, **dict.fromkeys(ADAPTERS, plain), "long": stretched}


def engine(root, backend, **options):
    options = {"dtype": "float32", "max_num_seqs": 6, "max_loras": 3, "device": DEVICE, **options}
    args = {
        **OPTIONS,
        "max_cpu_loras": 5,
        "punica_backend": backend,
        "long_lora_scaling_factors": (2.0,),
        **options,
    }
    llm = LLMEngine(EngineArgs(model=str(root / "base"), **args).create_engine_config())
    graph_steps(llm.runner, mixed=False)
    watch_replays(llm)
    return llm


def lora(root, name):
    return LoRARequest(name, list(ADAPTERS).index(name) + 1, str(root / name)) if name else None


@pytest.mark.parametrize("backend", without_gpu_at_night(["auto"], "triton"))
def test_captured_steps_give_the_tokens_of_each_request_alone(world, backend):
    """Six requests on three slots: slots change hands between replays of the same graph."""
    root, oracles = world
    llm = engine(root, backend)
    names = ["embedding", None, "both", "head", "neither", "long"]
    prompts = [token_ids(70 if name == "long" else 4 + 3 * i, i) for i, name in enumerate(names)]

    for i, name in enumerate(names):
        llm.add_request(str(i), prompts[i], greedy(5 + i), lora_request=lora(root, name))
    answers = run(llm)

    for i, name in enumerate(names):
        assert tokens_of(answers[str(i)]) == oracles[name].greedy(name, prompts[i], 5 + i), f"{i}: {name}"
    assert sum(with_lora > 0 for _, with_lora in llm.replayed) > 5, "hardly any step was replayed"


def test_embedding_and_head_are_left_out_where_no_adapter_of_the_step_has_anything_there(world):
    """One slot: a graph that is replayed for another adapter forgets the last one."""
    root, oracles = world
    llm = engine(root, "triton", max_loras=1)
    kinds = []

    for turn, name in enumerate(["neither", "head", None, "embedding", "neither"]):
        prompt = token_ids(5, turn)
        llm.replayed.clear()
        llm.add_request(str(turn), prompt, greedy(2), lora_request=lora(root, name))
        answer = tokens_of(run(llm)[str(turn)])

        assert answer == oracles[name].greedy(name, prompt, 2), f"turn {turn}: {name}"
        kinds += [with_lora for _, with_lora in llm.replayed]

    assert kinds == [1, 2, 0, 2, 1]
