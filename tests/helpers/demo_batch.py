"""Prompts of the demo's four adapters and of its base model, in one batch with two slots."""

from demo_tasks import NAMES, adapter_folder, demo_base, task_prompts

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

# Of a process whose `minivllm` may be another one, with its LLM from `module`.
SCRIPT = """
import json, sys
from {module} import LLM
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


def pairs():
    """(adapter or None, prompt), two of each."""
    return task_prompts(2)


def asked():
    """What `SCRIPT` reads from stdin. It writes tokens, the package's file, and the names of its modules."""
    ids = {name: number for number, name in enumerate(NAMES, 1)}
    return {
        "base": str(demo_base()),
        "options": OPTIONS,
        "num_tokens": NUM_TOKENS,
        "prompts": [prompt for _, prompt in pairs()],
        "loras": [(name, ids.get(name), name and str(adapter_folder(name))) for name, _ in pairs()],
    }


def answers(asked):
    """The tokens that the whole product, here, answers with."""
    llm = LLM(asked["base"], **asked["options"])
    greedy = SamplingParams(temperature=0, max_tokens=asked["num_tokens"], ignore_eos=True)
    loras = [name and LoRARequest(name, number, path) for name, number, path in asked["loras"]]
    outputs = llm.generate(asked["prompts"], greedy, lora_request=loras, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
