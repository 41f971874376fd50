"""What a plain adapter makes the engine run, from its first request to its end; `-s` shows files and functions.

Plain: A and B on the seven linears, a local folder, a CPU. The engine is the product's, with all extensions.
"""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm import LLM, LLMEngine, LoRARequest
from minivllm.lora.events import LoRAEvent
from tests.tools import house
from tests.tools.watching import Calls, FirstProduct
from tests.worlds.engines import greedy, run, tiny_world, tokens_of

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BACKEND = "loops"  # the core's own
CORE = {path.relative_to(house.ROOT / "minivllm").as_posix() for path in house.core_files()}
ADDING = "add_request of a new adapter"
WARM = "a warm step before its first product"

MOST_FILES = {ADDING: 18, WARM: 14}
MOST_FUNCTIONS = {ADDING: 59}

# What of the extensions runs for a plain adapter, too.
AROUND = {
    # The scheduler's policy notes how far down the line a step came, for a trace that may be asked for later.
    ("observe/recorder.py", "WatchedLine.__call__"),
    # Versions of adapters have records of their own kind, which look whether an adapter has any.
    *(
        ("versions/registry.py", f"VersionedRegistry.{name}")
        for name in ("why_wait", "settle", "_in_flight", "_forget", "remove_lora")
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A base model, an adapter on the seven linears and another one."""
    world = tiny_world(tmp_path_factory)
    return world.base, world.path("all"), world.path("mlp")


def live(folders: tuple[Path, Path, Path], target_modules: list[str] | None) -> dict[str, Calls]:
    """A plain adapter's life in an engine with one slot and room for one adapter in memory; token ids in and out.

    Nobody counts what happens to adapters but a list, and nobody records the steps.
    """
    heard: list[LoRAEvent] = []
    engine = make_engine(folders[0], target_modules)
    engine.adapters.manager.listeners[:] = [heard.append]
    engine.listeners.clear()
    stretches = live_in(engine, *folders[1:])
    assert [event.adapter_id for event in heard if event.kind == "load"] == [1, 2, 1]
    return stretches


def make_engine(base: Path, target_modules: list[str] | None) -> LLMEngine:
    return LLM(
        base,
        device="cpu",
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=1,
        max_cpu_loras=1,
        max_lora_rank=32,
        target_modules=target_modules,
        punica_backend=BACKEND,
        num_kv_blocks=40,
        warm_up=False,
    ).llm_engine


def live_in(engine: LLMEngine, *adapters: Path) -> dict[str, Calls]:
    """Stretch of life -> what it enters."""
    mine, other = (LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters, 1))
    stretches = {ADDING: ask(engine, "first", mine), "load and slot": step(engine)}
    stretches[WARM] = step_to_first_product(engine)
    with Calls() as stretches["20 steps"]:
        first = run(engine)["first"]
    with Calls() as stretches["eviction by another adapter"]:
        engine.add_request("other", [5, 6, 7], greedy(2), lora_request=other)
        run(engine)
    assert engine.list_loras() == {2}
    with Calls() as stretches["reload"]:
        engine.add_request("again", [5, 6, 7, 8], greedy(20), lora_request=mine)
        again = run(engine)["again"]
    assert tokens_of(again) == tokens_of(first)
    with Calls() as stretches["unload"]:
        engine.remove_lora(1)
    assert engine.list_loras() == set()
    return stretches


def ask(engine: LLMEngine, request_id: str, adapter: LoRARequest) -> Calls:
    params = greedy(20)
    with Calls() as calls:
        engine.add_request(request_id, [5, 6, 7, 8], params, lora_request=adapter)
    return calls


def step(engine: LLMEngine) -> Calls:
    with Calls() as calls:
        engine.step()
    return calls


def step_to_first_product(engine: LLMEngine) -> Calls:
    """Of a step like the one before it."""
    engine.step()
    with Calls() as calls, FirstProduct(calls.end):
        engine.step()
    assert any(file.startswith("lora/layers/") for file in calls.files), "the product is no wrapped linear's"
    return calls


@pytest.fixture(scope="module")
def life(folders):
    yield live(folders, LINEARS)
    gc.collect()


def test_it_enters_nothing_around_the_core_but_what_is_named(life):
    for name, calls in life.items():
        print(f"\n{name}: {calls}")

    around = {(file, name) for calls in life.values() for file, name in calls.functions if file not in CORE}

    assert around == AROUND


@pytest.mark.parametrize("stretch", [ADDING, WARM])
def test_it_can_be_followed_by_a_reader(life, stretch):
    files = [file for file in life[stretch].files if not file.startswith(("layers/", "models/"))]

    assert len(files) <= MOST_FILES[stretch], life[stretch]
    assert len(life[stretch].functions) <= MOST_FUNCTIONS.get(stretch, 1000), life[stretch]


@pytest.mark.nightly
def test_a_slot_for_the_two_ends_adds_their_forward_alone(folders, life):
    known = {name for calls in life.values() for name in calls.functions}

    with_ends = live(folders, None)

    more = {name for calls in with_ends.values() for name in calls.functions} - known
    around = {(file, name) for file, name in more if file not in CORE}
    assert all(name.endswith(".forward") for _, name in around), around


WITHOUT_FACADE = """
import json, sys
from minivllm import LLM, LoRARequest, SamplingParams
base, adapter = sys.argv[1:]
llm = LLM(base, device="cpu", skip_tokenizer_init=True, enable_lora=True, max_lora_rank=32, num_kv_blocks=40)
greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
[output] = llm.generate([[5, 6, 7, 8]], greedy, lora_request=LoRARequest("mine", 1, adapter), use_tqdm=False)
loaded = [name for name in sys.modules if name.startswith("minivllm.vllm")]
print(json.dumps([output.outputs[0].token_ids, loaded]))
"""


@pytest.mark.nightly
def test_nothing_of_vllms_further_names_is_needed(folders):
    base, mine, other = map(str, folders)

    ran = [
        subprocess.run([sys.executable, "-c", WITHOUT_FACADE, base, adapter], capture_output=True, text=True)
        for adapter in (mine, other)
    ]

    answers = [json.loads(one.stdout) for one in ran if not one.returncode]
    assert len(answers) == 2, ran[0].stderr + ran[1].stderr
    assert [loaded for _, loaded in answers] == [[], []]
    assert answers[0][0] != answers[1][0], "the adapters make no difference"
