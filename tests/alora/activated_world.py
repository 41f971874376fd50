"""A tiny base model with aLoRA adapters beside plain ones, and what transformers + PEFT answer to all of them."""

import random
import sys
from functools import partial
from pathlib import Path

import torch

from minivllm import LLMEngine
from tests.oracles.peft import all_in_float64, load_oracle
from tests.worlds.adapters import ADAPTERS, AdapterFolders, save_adapter
from tests.worlds.arrivals import Asked, check_answers, serve_arrivals
from tests.worlds.engines import greedy, made_once, make_engine
from tests.worlds.models import save_base

# Tokens that overlap themselves and each other, on few modules, on all linears and on the head, with patterns
# and without.
INVOCATIONS = {
    "one": ([7], {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "twice": ([5, 5], {"r": 8, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"}),
    "bridge": ([5, 6, 5], {"r": 3, "lora_alpha": 5.5, "target_modules": ["k_proj", "down_proj"]}),
    "long": (
        [6, 5, 5, 7, 6],
        {
            "r": 6,
            "lora_alpha": 7,
            "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj", "lm_head"],
            "rank_pattern": {"o_proj": 2, "layers.1.self_attn.q_proj": 12},
            "alpha_pattern": {"down_proj": 13},
        },
    ),
}
PLAIN = ("qv", "patterns")
# Other weights and other tokens for an adapter's id.
SECOND = {"one": "one again", "twice": "twice again"}
AGAIN = {
    "one again": ([5, 7], {"r": 5, "target_modules": ["q_proj", "up_proj"]}),
    "twice again": ([6], {"r": 2, "target_modules": "all-linear"}),
}


class ActivatedWorld(AdapterFolders):
    """A base model's folder, and folders of adapters that invocation tokens activate and of plain ones."""

    def __init__(self, folder: Path, variant: str) -> None:
        self.folder, self.base = folder, folder / "base"
        self.names = [*INVOCATIONS, *PLAIN]
        save_base(self.base, variant)
        for seed, (name, (tokens, config)) in enumerate({**INVOCATIONS, **AGAIN}.items()):
            options = {"alora_invocation_tokens": tokens, "task_type": "CAUSAL_LM", **config}
            save_adapter(self.path(name), self.base, seed, **options)
        for seed, name in enumerate(PLAIN):
            save_adapter(self.path(name), self.base, 10 + seed, **ADAPTERS[name])
        self._oracle: torch.nn.Module | None = None

    def engine(self, **options: object) -> LLMEngine:
        return make_engine(self.base, None, options)

    @property
    def oracle(self) -> torch.nn.Module:
        """transformers + PEFT with all adapters, which `adapter_names` chooses among row by row."""
        if self._oracle is None:
            from peft import PeftModel

            base = load_oracle(self.base)
            all_in_float64(base)
            for name in [*self.names, *AGAIN]:
                if self._oracle is None:
                    self._oracle = PeftModel.from_pretrained(base, self.path(name), adapter_name=name)
                else:
                    self._oracle.load_adapter(self.path(name), adapter_name=name)
            self._oracle.to(torch.float64).eval()
        return self._oracle

    def start(self, asked: Asked) -> int:
        """The first token that the adapter computes, as PEFT finds it in a prompt; sys.maxsize if there is none."""
        from peft.tuners.lora.variants import calculate_alora_offsets

        if asked.whose is None:
            return sys.maxsize
        if asked.whose in PLAIN:
            return 0
        config, ids = self.oracle.peft_config, torch.tensor([asked.prompt])
        (offset,) = calculate_alora_offsets(config, asked.whose, ids)
        return sys.maxsize if offset is None else len(asked.prompt) - offset

    @torch.inference_mode()
    def logits(self, group: list[Asked]) -> torch.Tensor:
        """Of each prompt with its answer, padded on the right: (texts, longest, V)"""
        texts = [asked.prompt + asked.answer for asked in group]
        longest = max(map(len, texts))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        # PEFT counts from the end of what it is given, and would look for tokens in answers, too.
        offsets = [max(longest - self.start(asked), 0) or None for asked in group]
        names = [asked.whose or "__base__" for asked in group]
        return self.oracle(padded, adapter_names=names, alora_offsets=offsets, use_cache=False).logits

    def check_answers(self, asked: list[Asked]) -> int:
        return check_answers(asked, lambda _, group: self.logits(group))

    def by_whom(self, asked: Asked) -> list[tuple[int, str | None]]:
        """Each token of a prompt and its answer, and whose keys and values it has."""
        tokens, start = asked.prompt + asked.answer, self.start(asked)
        return [(token, asked.whose if i >= start else None) for i, token in enumerate(tokens)]


def prompts(rng: random.Random, count: int, longest: int = 40) -> list[list[int]]:
    """Conversations, most of which go on from an earlier one: of few tokens, so that invocations are many."""
    made: list[list[int]] = []
    for _ in range(count):
        begin = rng.choice(made)[: rng.randint(1, longest)] if made and rng.random() < 0.7 else []
        turn = [rng.choice((5, 6, 7, 8, 9, rng.randint(3, 96))) for _ in range(rng.randint(1, longest // 3))]
        invoked = rng.choice([tokens for tokens, _ in {**INVOCATIONS, **AGAIN}.values()])
        tail = [rng.choice((5, 6, 8)) for _ in range(rng.randint(0, 6))]
        made.append([*begin, *turn, *rng.choice(([], invoked, [*invoked, *tail]))][-2 * longest :])
    return made


def serve(
    world: ActivatedWorld, engine: LLMEngine, rng: random.Random, count: int, reloads: bool = True
) -> list[Asked]:
    """Requests of all adapters and base; now and then an adapter is loaded again."""
    folders = {name: name for name in world.names}
    conversations = prompts(rng, count)

    def ask(request_id: str) -> Asked:
        prompt = conversations[int(request_id)]
        name = rng.choice([None, None, *INVOCATIONS, *INVOCATIONS, *PLAIN])
        request = None
        if name is not None:
            changes = {}
            if reloads and name in SECOND and rng.random() < 0.1:
                folders[name] = SECOND[name] if folders[name] == name else name
                changes = {"load_inplace": True}
            request = world.request(name, lora_path=str(world.path(folders[name])), **changes)
        engine.add_request(request_id, prompt, greedy(rng.randint(1, 12)), lora_request=request)
        return Asked(name and folders[name], prompt)

    asked = serve_arrivals(engine, rng, count, ask)
    check_hits(world, engine, asked)
    return list(asked.values())


def check_hits(world: ActivatedWorld, engine: LLMEngine, asked: dict[str, Asked]) -> None:
    """What a request finds was computed before: the same tokens, each by whoever computes it in this request, too."""
    before: set[str] = set()
    owners = {key: world.by_whom(one) for key, one in asked.items()}
    for record in engine.trace.records:
        for row in record.rows:
            if row.cached:
                own = owners[row.request][: row.cached]
                assert any(owners[key][: row.cached] == own for key in before), row
        before |= {row.request for row in record.rows}


activated_world = partial(made_once, ActivatedWorld)
