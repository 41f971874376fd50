"""The core's files in an empty folder are an engine: the tokens of the whole product, and of transformers + PEFT."""

import gc
import json
import os
import shutil
import subprocess
import sys

import pytest
from demo_oracle import DemoOracle
from demo_tasks import NAMES, adapter_folder, demo_base, task_prompts
from house import ROOT, core_files

from minivllm import LLM, LoRARequest, SamplingParams

NUM_TOKENS = 12
OPTIONS = {
    "dtype": "float32",
    "enable_lora": True,
    "max_loras": 2,  # four adapters share them
    "max_cpu_loras": 3,
    "max_lora_rank": 32,
    "max_model_len": 512,
    "num_kv_blocks": 40,
}

SCRIPT = """
import json, sys
from minivllm.engine.llm import LLM
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams

asked = json.load(sys.stdin)
llm = LLM(asked["base"], **asked["options"])
loras = [name and LoRARequest(name, i, path) for name, i, path in asked["loras"]]
greedy = SamplingParams(temperature=0, max_tokens=asked["num_tokens"], ignore_eos=True)
outputs = llm.generate(asked["prompts"], greedy, lora_request=loras, use_tqdm=False)
imported = sorted(name for name in sys.modules if name.partition(".")[0] == "minivllm")
print(json.dumps([[output.outputs[0].token_ids for output in outputs], sys.modules["minivllm"].__file__, imported]))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with the core's files as a package, whose own `__init__` is empty, and with nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    for path in core_files():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (folder / "minivllm" / "__init__.py").touch()
    return folder


def run_alone(folder, *arguments, given=""):
    """A Python that finds the folder's package first, started elsewhere."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, cwd=folder.parent, env=environment
    )
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout


def test_each_of_its_modules_can_be_imported_by_itself_alone(alone):
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in core_files()]
    names = [name.removesuffix(".__init__") for name in names]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)\nprint('all')"

    assert run_alone(alone, "-c", code) == "all\n"


def test_it_serves_more_adapters_than_slots_and_base_in_one_batch(alone):
    base, pairs = demo_base(), task_prompts(2)
    ids = {name: number for number, name in enumerate(NAMES, 1)}
    asked = {
        "base": str(base),
        "options": OPTIONS,
        "num_tokens": NUM_TOKENS,
        "prompts": [prompt for _, prompt in pairs],
        "loras": [(name, ids.get(name), name and str(adapter_folder(name))) for name, _ in pairs],
    }

    answers, where, imported = json.loads(run_alone(alone, "-c", SCRIPT, given=json.dumps(asked)))

    assert where == str(alone / "minivllm" / "__init__.py")
    assert "minivllm.assembly" not in imported and len(imported) > 40
    assert answers == of_the_whole_product(asked)
    assert len({tuple(answer) for answer in answers}) == len(answers), "adapters make no difference"
    oracle = DemoOracle(base, NUM_TOKENS)
    for (name, prompt), answer in zip(pairs, answers):
        likeliest, lead = oracle.likeliest(name, prompt, answer)
        assert answer == likeliest, f"{name}: PEFT's tokens lead by {max(lead)}"
    gc.collect()


def of_the_whole_product(asked):
    llm = LLM(asked["base"], **asked["options"])
    greedy = SamplingParams(temperature=0, max_tokens=asked["num_tokens"], ignore_eos=True)
    loras = [name and LoRARequest(name, number, path) for name, number, path in asked["loras"]]
    outputs = llm.generate(asked["prompts"], greedy, lora_request=loras, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
