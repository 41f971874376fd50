"""`python -m benchmarks.activated`: adapters asked within a conversation of the base model, as aLoRA and as LoRA.

The base model answers turn by turn. After each of its answers another adapter is asked about the conversation so far,
and its answer is no part of it. The same weights are served as LoRA and as aLoRA, on the same tokens, in alternation.
"""

import json
import random
import shutil
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.arguments import device, model, run_as_command, whole
from benchmarks.options import model_folder
from benchmarks.report import Report, default_path
from minivllm.assembly import LLMEngine
from minivllm.commands.random_adapter import save_random_adapter
from minivllm.engine_args import EngineArgs
from minivllm.lora.request import LoRARequest
from minivllm.models.demo_model import demo_model_path
from minivllm.sampling_params import SamplingParams

NAME = "python -m benchmarks.activated"
INVOCATION = [9, 9, 7, 9]  # no prompt below has such small ids
RANK = 16
DEMO = "demo"


def demo_or_shape(text: str) -> str:
    return text if text == DEMO else model(text)


def write_adapters(folder: Path, model: str, turns: int) -> dict[str, list[LoRARequest]]:
    """For each turn an adapter, once as LoRA and once, with the same weights, as aLoRA."""
    adapters: dict[str, list[LoRARequest]] = {"LoRA": [], "aLoRA": []}
    for turn in range(turns):
        plain, activated = folder / f"plain{turn}", folder / f"activated{turn}"
        save_random_adapter(plain, model, RANK, seed=turn, dtype=torch.float32)
        shutil.copytree(plain, activated)
        config = json.loads((plain / "adapter_config.json").read_text())
        config["alora_invocation_tokens"] = INVOCATION
        (activated / "adapter_config.json").write_text(json.dumps(config))
        adapters["LoRA"].append(LoRARequest(plain.name, 2 * turn + 1, str(plain)))
        adapters["aLoRA"].append(LoRARequest(activated.name, 2 * turn + 2, str(activated)))
    return adapters


def ask(
    engine: LLMEngine, prompt: list[int], answer: int, adapter: LoRARequest | None = None
) -> tuple[list[int], float]:
    """The tokens of an answer, and the seconds until the first of them."""
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    started, first, tokens = time.perf_counter(), None, []
    engine.add_request("r", prompt, params, lora_request=adapter)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first = first or time.perf_counter() - started
            tokens = output.outputs[0].token_ids
    return list(tokens), first or 0.0


def converse(
    engine: LLMEngine, options: Namespace, adapters: Sequence[LoRARequest], seed: int
) -> dict[str, float]:
    """One conversation: the tokens that were computed, and milliseconds to the first token of adapters' answers."""
    rng, largest = random.Random(seed), min(40_000, engine.config.model_config.get_vocab_size())

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, largest) for _ in range(count)]

    began, of_adapters, firsts = engine.scheduler.num_computed_tokens, 0, []
    conversation = tokens(options.prompt)
    for adapter in adapters:
        conversation += ask(engine, conversation, options.answer)[0]
        before = engine.scheduler.num_computed_tokens
        firsts.append(ask(engine, conversation + INVOCATION, options.judgement, adapter)[1] * 1e3)
        of_adapters += engine.scheduler.num_computed_tokens - before
        conversation += tokens(options.turn)
    return {
        "computed": engine.scheduler.num_computed_tokens - began,
        "of_adapters": of_adapters,
        "first_token_ms": statistics.median(firsts),
        "last_turn_ms": firsts[-1],
    }


def run(options: Namespace, result: Report, folder: Path) -> None:
    is_demo = options.model == DEMO
    model = str(demo_model_path()) if is_demo else model_folder(options.model)
    adapters = write_adapters(folder, model, options.turns)
    args = EngineArgs(
        model,
        load_format="auto" if is_demo else "dummy",
        skip_tokenizer_init=not is_demo,
        dtype="float32" if options.device == "cpu" else "bfloat16",
        device=options.device,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_kv_blocks=2048,
        enable_lora=True,
        max_loras=2 * options.turns,
        max_cpu_loras=2 * options.turns,
    )
    engine = LLMEngine.from_engine_args(args)
    for adapter in (one for of_kind in adapters.values() for one in of_kind):
        engine.add_lora(adapter)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in adapters}
    for seed in range(options.rounds + 1):
        for kind in list(adapters)[:: 1 if seed % 2 else -1]:
            # Tokens of its own, so that nothing of the other kind's conversation is found.
            found[kind].append(converse(engine, options, adapters[kind], 2 * seed + (kind == "LoRA")))
    for kind, rounds in found.items():
        medians = {name: round(statistics.median(r[name] for r in rounds[1:]), 1) for name in rounds[0]}
        result.add({"adapters": kind, **medians})
    ratios = [
        a["first_token_ms"] / b["first_token_ms"] for a, b in zip(found["LoRA"][1:], found["aLoRA"][1:])
    ]
    result.add({"adapters": "LoRA over aLoRA", "first_token": round(statistics.median(ratios), 2)})


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument(
        "--model", type=demo_or_shape, default=DEMO, help=f"{DEMO}, or a shape; random weights"
    )
    parser.add_argument("--device", type=device, default="cpu", help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--max-num-batched-tokens", type=whole(), default=2048)
    parser.add_argument("--turns", type=whole(), default=5, help="of the base model, and as many of adapters")
    parser.add_argument("--prompt", type=whole(), default=512, help="tokens before the first turn")
    parser.add_argument("--turn", type=whole(), default=64, help="tokens of each further question")
    parser.add_argument("--answer", type=whole(), default=32, help="tokens of each answer of the base model")
    parser.add_argument("--judgement", type=whole(), default=8, help="tokens of each answer of an adapter")
    parser.add_argument("--rounds", type=whole(), default=5, help="medians are reported")
    parser.add_argument("--json", type=Path, help="result file; one that is there grows")
    options = parser.parse_args(arguments)
    kept = {key: value for key, value in vars(options).items() if key != "json"}
    path = options.json or default_path("activated", options.device)
    result = Report(path, "activated", kept, options.device)
    with tempfile.TemporaryDirectory() as folder:
        run(options, result, Path(folder))


if __name__ == "__main__":
    run_as_command(NAME, main)
