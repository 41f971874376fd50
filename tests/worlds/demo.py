"""The demo model, its four adapters, prompts of their tasks, and what transformers + PEFT answer."""

import random
from pathlib import Path

import pytest
import torch

from minivllm import LLM, LoRARequest, SamplingParams
from tests.oracles.peft import Oracle

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("json", "sql", "bullets", "dates")


def demo_base() -> Path:
    from minivllm.models.demo_model import demo_model_path

    return demo_model_path(progress=False)


def adapter_folder(name: str) -> Path:
    return ROOT / "adapters" / name


def task_prompts(per_adapter: int) -> list[tuple[str | None, str]]:
    """(adapter, prompt) in random order: `per_adapter` of every adapter's task for itself, and one of each for base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from adapters.recipe.tasks import examples, prompt

    pairs = [(name, prompt(name, e.text)) for name in NAMES for e in examples(name, per_adapter, seed=7)]
    pairs += [(None, prompt(name, examples(name, 1, seed=8)[0].text)) for name in NAMES]
    random.Random(0).shuffle(pairs)
    return pairs


class DemoOracle(Oracle):
    """In float32, with the four adapters and the model's own tokenizer."""

    def __init__(self, base, num_tokens):
        from transformers import AutoTokenizer

        super().__init__(base, torch.float32)
        self.num_tokens = num_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        for name in NAMES:
            self.load(name, adapter_folder(name))

    def generate(self, adapter, prompt):
        ids = self.tokenizer(prompt, return_tensors="pt")
        output = self.call(
            adapter, lambda model: model.generate(**ids, max_new_tokens=self.num_tokens, do_sample=False)
        )
        return output[0, ids["input_ids"].shape[1] :].tolist()

    def likeliest(self, adapter, prompt, tokens):
        """For every token of an answer: the one that is likeliest there, and by how much it leads the answer's.

        An answer all of whose tokens are likeliest is the greedy one: each was picked after the same tokens.
        """
        ids = self.tokenizer(prompt)["input_ids"]
        rows = self.logits(adapter, [ids + tokens])[0, len(ids) - 1 : -1]
        best = rows.max(-1)
        lead = best.values - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return best.indices.tolist(), lead.tolist()


NUM_TOKENS = 12
OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
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


def asked(base, folders, pairs, **options):
    """What `SCRIPT` reads from stdin. It writes tokens, the package's file, and the names of its modules.

    folders   adapter -> its folder    pairs   (adapter or None, prompt)    options   of the engine, beside `OPTIONS`
    """
    ids = {name: number for number, name in enumerate(folders, 1)}
    return {
        "base": str(base),
        "options": {**OPTIONS, **options},
        "num_tokens": NUM_TOKENS,
        "prompts": [
            prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for _, prompt in pairs
        ],
        "loras": [(name, ids.get(name), name and str(folders[name])) for name, _ in pairs],
    }


def answers(asked):
    """The tokens that the whole product, here, answers with."""
    llm = LLM(asked["base"], **asked["options"])
    greedy = SamplingParams(temperature=0, max_tokens=asked["num_tokens"], ignore_eos=True)
    loras = [name and LoRARequest(name, number, path) for name, number, path in asked["loras"]]
    outputs = llm.generate(asked["prompts"], greedy, lora_request=loras, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
