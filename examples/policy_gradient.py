"""Policy gradient: an adapter learns from rewards of its own answers, while the engine that samples them serves it.

Each round the engine gives several answers to a question, with the logprob of each token. PyTorch and PEFT take a step
of the policy gradient on them, which makes answers likelier the further their reward is above the others', and
`update_lora` hands the new tensors to the engine as the adapter's next version. The reward is the share of an answer's
characters that are digits. Others may ask the engine meanwhile: the base model, other adapters, or this one.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from minivllm import LLM, LoRARequest, RequestOutput, SamplingParams
from minivllm.models.demo_model import demo_model_path
from minivllm.versions.policy_loss import policy_loss

QUESTION = "<|im_start|>user\nHow old is your house?<|im_end|>\n<|im_start|>assistant\n"


class Round(NamedTuple):
    reward: float  # mean of the answers
    seconds: float
    off: float  # of the engine's logprobs from PEFT's, at most


def share_of_digits(answer: str) -> float:
    return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)


def logprobs_of(model: torch.nn.Module, output: RequestOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the answers' tokens by the model in training, and by the engine; nan behind an answer's end."""
    first, answers = len(output.prompt_token_ids), output.outputs
    texts = torch.zeros(len(answers), first + max(len(a.token_ids) for a in answers), dtype=torch.long)
    engine = torch.full((len(answers), texts.shape[1] - first), torch.nan)
    for row, answer in enumerate(answers):
        ids = output.prompt_token_ids + answer.token_ids
        texts[row, : len(ids)] = torch.tensor(ids)  # nobody looks at what is behind the end
        own = [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids)]
        engine[row, : len(own)] = torch.tensor(own)
    logits = model(texts, logits_to_keep=texts.shape[1] - first + 1).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, texts[:, first:, None])[..., 0], engine


def learn(
    model: str | Path,
    prompt: str = QUESTION,
    reward: Callable[[str], float] = share_of_digits,
    rounds: int = 12,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> list[Round]:
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], learning_rate)
    llm = LLM(model, enable_lora=True, max_lora_rank=8, max_model_len=128, dtype="float32")
    history, folder = [], tempfile.TemporaryDirectory()
    trained.save_pretrained(folder.name)  # B is zero: version 0 answers as the base model does
    for number in range(rounds):
        started = time.perf_counter()
        sampling = SamplingParams(n=16, max_tokens=12, logprobs=0, seed=1000 * seed + 100 * number)
        adapter = LoRARequest("learner", 1, folder.name)
        [output] = llm.generate(prompt, sampling, lora_request=adapter, use_tqdm=False)
        assert output.lora_version == number, "each round samples from the newest weights"

        rewards = torch.tensor([reward(answer.text) for answer in output.outputs])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        ours, engine = logprobs_of(trained, output)
        policy_loss(ours, engine, advantages).backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        llm.update_lora("learner", get_peft_model_state_dict(trained))

        off = (ours - engine)[~engine.isnan()].abs().max().item()
        history.append(Round(rewards.mean().item(), time.perf_counter() - started, off))
        print(f"version {number}: reward {rewards.mean():.2f}, logprobs off by {off:.1e}", flush=True)
    folder.cleanup()
    return history


def picture(histories: list[list[Round]], path: Path = Path("out/policy_gradient.png")) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for seed, history in enumerate(histories):
        axes.plot([each.reward for each in history], marker="o", markersize=3, label=f"seed {seed}")
    axes.set(xlabel="version of the adapter", ylabel="share of digits in its answers", ylim=(0, 1))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    picture([learn(demo_model_path())])
