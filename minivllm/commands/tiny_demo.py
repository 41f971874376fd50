"""`minivllm demo --tiny`: a mixed batch on a tiny random model, on two backends whose tokens must agree.

Without a GPU it shows Triton's kernels at work: the interpreter takes seconds here, and hours on the demo model.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from minivllm.assembly import LLMEngine
from minivllm.commands.common import console, print_json
from minivllm.commands.random_adapter import save_random_adapter
from minivllm.engine_args import EngineArgs
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
RANKS = {"red": 4, "green": 8}  # adapter -> rank
ALPHA = 2000  # random adapters are weak; these shall be heard
PROMPTS = {"red": [5, 11, 17], "green": [5, 11, 17], None: [5, 11, 17, 23, 42]}
REFERENCE = "loops"


def run_tiny_demo(max_tokens: int, options: dict[str, Any], as_json: bool) -> bool:
    """Serve three requests in one batch, on the backend asked for and token by token, and print both.

    options   further `EngineArgs`, `punica_backend` among them; "auto" is triton. Returns whether the tokens agree
    """
    backend = options.get("punica_backend", "auto")
    backend = "triton" if backend == "auto" else backend
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    with tempfile.TemporaryDirectory() as folder, console.status("serving a tiny model twice"):
        requests = write_tiny_world(Path(folder))
        answers = {
            name: serve(folder, requests, max_tokens, {**options, "punica_backend": name})
            for name in (backend, REFERENCE)
        }
    agree = answers[backend] == answers[REFERENCE]
    if as_json:
        print_json({"agree": agree, "tokens": answers})
    else:
        show(answers, agree)
    return agree


def write_tiny_world(folder: Path) -> dict[str, LoRARequest | None]:
    """A model without weights, and adapters for it. Returns each request's adapter, None = base."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for seed, (name, rank) in enumerate(RANKS.items(), 1):
        save_random_adapter(folder / name, str(folder), rank, seed, torch.float32, ALPHA)
    loras = {name: LoRARequest(name, i, str(folder / name)) for i, name in enumerate(RANKS, 1)}
    return {name or "base": loras[name] if name else None for name in PROMPTS}


def serve(
    model: str, requests: dict[str, LoRARequest | None], max_tokens: int, options: dict[str, Any]
) -> dict[str, list[int]]:
    """The tokens of every request, all of them in one batch."""
    args = EngineArgs(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=len(RANKS),
        max_lora_rank=max(RANKS.values()),
        max_model_len=CONFIG["max_position_embeddings"],
        num_kv_blocks=32,
        warm_up=False,
        **options,
    )
    engine = LLMEngine.from_engine_args(args)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for name, lora in requests.items():
        engine.add_request(name, PROMPTS[lora and name], params, lora_request=lora)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return dict(sorted(tokens.items()))


def show(answers: dict[str, dict[str, list[int]]], agree: bool) -> None:
    table = Table("adapter", *(f"tokens by {name}" for name in answers), show_lines=True)
    for adapter in next(iter(answers.values())):
        table.add_row(adapter, *(" ".join(map(str, tokens[adapter])) for tokens in answers.values()))
    console.print(table, highlight=False)
    console.print("The tokens agree." if agree else "[red]The tokens differ.[/]", highlight=False)
