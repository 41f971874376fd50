"""Train the demo adapters with PEFT: `python -m adapters.recipe.train [TASK ..] [--device cuda]`."""

import argparse
import dataclasses
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from adapters.recipe.tasks import TASKS, examples, prompt
from minivllm.models.demo_model import demo_model_path

ADAPTERS = Path(__file__).resolve().parents[1]
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one adapter is trained.

    lora: what LoraConfig is given.
    steps: optimiser steps of `batch` examples each.
    """

    lora: dict
    steps: int
    learning_rate: float
    batch: int = 32
    warmup: int = 20
    seed: int = 0


# Unlike each other where an engine may trip: rank, scaling, targets, patterns.
RECIPES = {
    "json": Recipe(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ATTENTION + MLP,
            # Keys are matched against the end of a module's name, and each matches some of the modules only.
            "rank_pattern": {"o_proj": 8, "down_proj": 12, r"layers\.2\d\.self_attn\.v_proj": 12},
            "alpha_pattern": {"o_proj": 24, r"layers\.[0-4]\.self_attn\.q_proj": 4},
        },
        500,
        1e-3,
    ),
    "sql": Recipe({"r": 16, "lora_alpha": 32, "target_modules": ATTENTION + MLP}, 500, 1e-3, seed=1),
    "bullets": Recipe({"r": 8, "lora_alpha": 16, "target_modules": MLP}, 500, 1e-3, seed=1),
    "dates": Recipe(
        {"r": 32, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}, 400, 1e-3
    ),
}


def train(task: str, steps: int, log: Progress, device: str = "cpu") -> PeftModel:
    """The trained adapter of a task on the base model, its weights in float32."""
    recipe = RECIPES[task]
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    # The frozen weights are multiplied in bfloat16, the adapter's own stay in float32.
    base = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.bfloat16).to(device)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **recipe.lora))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=steps, pct_start=recipe.warmup / steps
    )
    data = examples(task, steps * recipe.batch, "train", recipe.seed)
    bar = log.add_task(task, total=steps, loss="")
    for step in range(steps):
        batch = data[step * recipe.batch : (step + 1) * recipe.batch]
        loss = answer_loss(model, *(rows.to(device) for rows in encode(tokenizer, task, batch)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        log.update(bar, advance=1, loss=f"loss {loss.item():.4f}")
        if step % 25 == 24:
            log.console.print(f"{task}: step {step + 1}, loss {loss.item():.4f}")
    return model


def encode(tokenizer: PreTrainedTokenizerBase, task: str, batch: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of a batch, (B, T) each, padded to its longest; labels but on answers are -100."""
    rows = []
    for example in batch:
        question = tokenizer(prompt(task, example.text)).input_ids
        answer = tokenizer(example.answer + tokenizer.eos_token).input_ids
        rows.append((question + answer, [-100] * len(question) + answer))
    longest = max(len(ids) for ids, _ in rows)
    ids = [ids + [tokenizer.eos_token_id] * (longest - len(ids)) for ids, _ in rows]
    labels = [labels + [-100] * (longest - len(labels)) for _, labels in rows]
    return torch.tensor(ids), torch.tensor(labels)


def answer_loss(model: PeftModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens. Logits are computed for these only: the vocabulary is large.

    ids, labels: (B, T)
    """
    llama = model.get_base_model()
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = llama.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # (B, T-1, H)
        targets = labels[:, 1:]  # (B, T-1)
        logits = llama.lm_head(hidden[targets != -100])  # (answer tokens, V)
    return cross_entropy(logits.float(), targets[targets != -100])


def save(model: PeftModel, folder: Path) -> None:
    """Write an ordinary PEFT folder, weights in bfloat16."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_MODEL
    config.target_modules = sorted(config.target_modules)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=TASKS, help=f"any of {', '.join(TASKS)}; all by default")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="where the folders go")
    args = parser.parse_args()
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}")) as log:
        for task in args.tasks:
            save(train(task, args.steps or RECIPES[task].steps, log, args.device), args.out / task)


if __name__ == "__main__":
    main()
