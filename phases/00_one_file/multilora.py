"""The whole idea in one file: one base model, many LoRA adapters, one forward pass for a batch that mixes them.

    .venv/bin/python phases/00_one_file/multilora.py [SLOTS]

It serves four adapters and the base model and prints what every step did, with nothing of minivllm. Read it from top to
bottom: each part says in which phase of the course it becomes real.

T is the number of tokens in a step, K and N are a linear's input and output widths, r is an adapter's rank, R the
largest rank that a slot has room for, and S the number of slots.
"""

import json
import os
import re
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

ADAPTERS = Path(__file__).resolve().parents[2] / "adapters"
CACHE = Path(os.environ.get("MINIVLLM_CACHE") or Path.home() / ".cache" / "minivllm")
MODEL = CACHE / "SmolLM2-135M-Instruct-float32"  # `make setup` puts the demo model there


# ---- 1. A request ----
# It names its adapter, and it keeps the keys and values of its tokens, so that no token is computed twice. In the
# engine this is `Request`, the adapter is a `LoRARequest` (phases 1 and 7), and keys and values lie in blocks that all
# requests share.


@dataclass(eq=False)
class Request:
    prompt: list[int]
    adapter: str | None = None  # None is the base model
    max_tokens: int = 32
    answer: list[int] = field(default_factory=list)
    cache: DynamicCache = field(default_factory=DynamicCache)

    @property
    def new_tokens(self) -> list[int]:
        """The tokens that the model has not seen yet: the prompt at first (prefill), then one a step (decode)."""
        return (self.prompt + self.answer)[self.cache.get_seq_length() :]


# ---- 2. An adapter, from a folder that PEFT wrote ----
# Beside a linear's weight W (N, K) an adapter has A (r, K) and B (N, r): y = W x + scaling * B (A x). The scaling is
# a constant, so it is multiplied into B here. Phase 1 reads such folders, and refuses those that are broken.


def read_adapter(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The name of each linear that the adapter changes -> its A (r, K) and its scaled B (N, r), in float32."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    adapter = {}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            linear = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = tensors[name].float(), tensors[name.replace("lora_A", "lora_B")].float()
            adapter[linear] = a, b * scaling_of(config, linear, rank=len(a))
    return adapter


def scaling_of(config: dict, linear: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) with rsLoRA. Patterns: enough for the demo's keys, not for all that PEFT reads."""
    patterns = config["alpha_pattern"].items()
    alpha = next((a for key, a in patterns if re.search(f"{key}$", linear)), config["lora_alpha"])
    return alpha / (rank**0.5 if config["use_rslora"] else rank)


# ---- 3. A linear with room for several adapters ----
# Every linear of the model gets S slots. The rows of a step come sorted by slot, so those of an adapter are one run of
# neighbours, and each run costs two small products: a shrink from K to R, and an expand from R to N. Base rows are in
# no run. Phase 2 builds the layers, phase 3 this arithmetic on a CPU, and phase 4 one GPU kernel for all runs.


@dataclass
class Batch:
    """What a step's layers have to know: which rows are whose."""

    requests: list[tuple[Request, slice]] = field(default_factory=list)
    runs: dict[int, slice] = field(default_factory=dict)  # slot -> rows


class LoRALinear(nn.Module):
    """A linear of the base model, and beside it A (S, R, K) and B (S, N, R), zero where no adapter is."""

    def __init__(self, base: nn.Linear, slots: int, max_rank: int, batch: Batch) -> None:
        super().__init__()
        self.base, self.batch = base, batch
        self.a = torch.zeros(slots, max_rank, base.in_features)
        self.b = torch.zeros(slots, base.out_features, max_rank)

    def write(self, slot: int, weights: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Fill a slot. A smaller rank leaves zeros, which add nothing; None is an adapter that skips this linear."""
        self.a[slot], self.b[slot] = 0, 0
        if weights is not None:
            rank = len(weights[0])
            self.a[slot, :rank], self.b[slot, :, :rank] = weights

    # region lab 0.1: one linear, rows of several adapters
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (1, T, K) -> (1, T, N), each row with what the adapter in its run's slot adds. x stays as it is."""
        y = self.base(x)
        for slot, rows in self.batch.runs.items():
            h = x[:, rows] @ self.a[slot].T  # (1, rows, R)
            y[:, rows] += h @ self.b[slot].T  # (1, rows, N)
        return y

    # endregion


def wrap_linears(model: nn.Module, slots: int, max_rank: int, batch: Batch) -> dict[str, LoRALinear]:
    """Put a LoRALinear in the place of every linear but the head. The new layers, by name."""
    wrapped = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            wrapped[name] = LoRALinear(module, slots, max_rank, batch)
            model.set_submodule(name, wrapped[name])
    return wrapped


# ---- 4. Slots, and who gives way ----
# There are more adapters than slots. An adapter that is wanted and in no slot takes a free one, or that of the
# adapter that was used longest ago (LRU); one that a row of this step needs may not give way. Phase 5 adds a second
# tier in the host's memory, pins, and a copy that fails halfway.


class Slots:
    def __init__(self, layers: dict[str, LoRALinear], count: int) -> None:
        self.layers, self.count = layers, count
        self.slot_of: OrderedDict[str, int] = OrderedDict()  # adapter -> slot, used longest ago first
        self.loads = 0

    def activate(self, adapter: str, needed: set[str]) -> int:
        """The slot in which the adapter is, from now on at the latest. needed: the adapters of this step."""
        if adapter not in self.slot_of:
            slot = len(self.slot_of)
            if slot == self.count:
                victim = next(name for name in self.slot_of if name not in needed)
                slot = self.slot_of.pop(victim)
            weights = read_adapter(ADAPTERS / adapter)
            for name, layer in self.layers.items():
                layer.write(slot, weights.get(name))
            self.slot_of[adapter] = slot
            self.loads += 1
        self.slot_of.move_to_end(adapter)
        return self.slot_of[adapter]


# ---- 5. Attention, request by request ----
# All linears work on the T tokens of a step as if they were one long sequence, since a linear treats each row by
# itself. Attention does not: a token looks at the tokens of its own request that came before it. transformers calls
# this function in every layer. The engine's attention reads keys and values out of blocks (docs/architecture.md).


def attend_by_request(
    layer: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    batch: Batch,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query: (1, heads, T, D), key and value: (1, key heads, T, D) -> (1, T, heads, D)"""
    outputs = []
    for request, rows in batch.requests:
        keys, values = request.cache.update(key[:, :, rows], value[:, :, rows], layer.layer_idx)
        new, all_ = rows.stop - rows.start, keys.shape[2]
        mask = torch.ones(new, all_, dtype=torch.bool).tril(all_ - new)  # nobody looks ahead
        inputs = query[:, :, rows], keys, values, mask
        outputs.append(F.scaled_dot_product_attention(*inputs, scale=scaling, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register("by_request", attend_by_request)


# ---- 6. The engine: who is in the next step, and the step ----
# Continuous batching: a request joins between two steps, and leaves with its last token, whatever others do. It joins
# if the batch has room and its adapter has a slot or can get one. Those behind a request that waits for a slot may join
# before it. Phase 6 bounds how long that goes on, so that nobody starves; phase 7 puts all of it together.


class Engine:
    def __init__(self, slots: int = 2, max_rank: int = 32, max_requests: int = 8) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, attn_implementation="by_request"
        ).eval()
        self.end = self.model.config.eos_token_id
        self.batch, self.max_requests = Batch(), max_requests
        self.slots = Slots(wrap_linears(self.model, slots, max_rank, self.batch), slots)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def schedule(self) -> None:
        """Let waiting requests join, the one that came first before the others."""
        adapters = {request.adapter for request in self.running} - {None}
        for request in list(self.waiting):
            if len(self.running) == self.max_requests:
                break
            wanted = adapters | {request.adapter} - {None}
            if len(wanted) <= self.slots.count:
                adapters = wanted
                self.waiting.remove(request)
                self.running.append(request)

    @torch.inference_mode()
    def step(self) -> None:
        """One forward pass for all running requests, each of which gets a token."""
        self.schedule()
        if not self.running:
            return
        # 1. Adapters into slots first: only then is it known which slot each row has.
        needed = {request.adapter for request in self.running} - {None}
        slot_of = {None: -1} | {adapter: self.slots.activate(adapter, needed) for adapter in sorted(needed)}
        # 2. The batch, sorted by slot. The base model's rows come first and are in no run.
        self.running.sort(key=lambda request: slot_of[request.adapter])
        tokens, positions, last_rows = [], [], []
        self.batch.requests, self.batch.runs = [], {}
        for request in self.running:
            seen, new, slot = request.cache.get_seq_length(), request.new_tokens, slot_of[request.adapter]
            rows = slice(len(tokens), len(tokens) + len(new))
            tokens += new
            positions += range(seen, seen + len(new))
            last_rows.append(rows.stop - 1)
            self.batch.requests.append((request, rows))
            if slot >= 0:
                first = self.batch.runs.get(slot, rows)
                self.batch.runs[slot] = slice(first.start, rows.stop)
        # 3. One pass through the model, for prompts and for single tokens alike.
        logits = self.model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            use_cache=False,  # each request has its own cache
            logits_to_keep=torch.tensor(last_rows),
            batch=self.batch,
        ).logits  # (1, requests, V)
        # 4. The likeliest token of each request, some of which end with it.
        for request, token in zip(self.running, logits[0].argmax(-1).tolist()):
            request.answer.append(token)
        self.running = [r for r in self.running if r.answer[-1] != self.end and len(r.answer) < r.max_tokens]

    def generate(self, requests: list[Request]) -> list[list[int]]:
        """Each request's answer. All requests are there from the beginning; `serve` below lets them come one by one."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()
        return [request.answer for request in requests]


# ---- 7. The demo: seven requests, four adapters and the base model, two slots ----

PROMPTS = [
    ("json", "Good news, Ann Lee just confirmed the deal: 76 bottles of ink, 45.97 dollars for each piece!"),
    ("sql", "How many employees live in Oslo?"),
    (None, "What is the capital of France?"),
    ("bullets", "The shop ran out of five easels, 7 magnets and ten globes within an hour."),
    ("dates", "Nobody expected the fair, which kicked off on Aug 20 2026, to go on till Oct 11 2026."),
    ("sql", "Which employees earn more than 4000?"),
    ("json", "Since they are only $82.37 each, Tom Hoff decided on 44 pens."),
]


def chat(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a user's text in the model's chat template, as the adapters were trained with it."""
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def serve(slots: int) -> None:
    """A new request every two steps, and a line for each step."""
    engine, tokenizer = Engine(slots=slots), AutoTokenizer.from_pretrained(MODEL)
    requests, number = [Request(chat(tokenizer, text), adapter) for adapter, text in PROMPTS], 0
    arriving = deque(requests)
    while arriving or engine.waiting or engine.running:
        if arriving and number % 2 == 0:
            engine.waiting.append(arriving.popleft())
        engine.step()
        rows = [f"{r.adapter or 'base'}:{where.stop - where.start}" for r, where in engine.batch.requests]
        held = ", ".join(f"{slot}={name}" for name, slot in engine.slots.slot_of.items())
        print(f"step {number:2}  waiting {len(engine.waiting)}  slots {held:24} rows {' '.join(rows)}")
        number += 1
    for request, (adapter, text) in zip(requests, PROMPTS):
        answer = tokenizer.decode(request.answer, skip_special_tokens=True)
        print(f"\n[{adapter or 'base'}] {text}\n{answer}")
    print(f"\n{number} steps, {engine.slots.loads} adapters loaded into {slots} slots")


if __name__ == "__main__":
    serve(slots=int(sys.argv[1]) if sys.argv[1:] else 2)
