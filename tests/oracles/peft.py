"""transformers + PEFT: what they answer alone, with one adapter at a time. Nothing of minivllm is used here."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch


def reference_logits(model, token_ids, dtype):
    """What transformers computes for one text alone, in float32 or all through in float64."""
    if dtype == torch.float64:
        all_in_float64(model)
    model.to(dtype)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def all_in_float64(model):
    """What transformers computes in float32 whatever the dtype, or not at all: norms, routers, experts."""
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and not isinstance(module, torch.nn.RMSNorm):
            norm = torch.nn.RMSNorm(module.weight.shape, module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
        elif kind.endswith("TopKRouter"):
            module.forward = functools.partial(_route_in_float64, module)
            model.set_experts_implementation("eager")


def _route_in_float64(router, hidden_states):
    """The router's logits, and the weights and numbers of the experts each token runs: (T, E), (T, k), (T, k)"""
    logits = hidden_states.reshape(-1, router.hidden_dim) @ router.weight.T
    likelihoods = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    chosen = likelihoods.argsort(dim=-1, descending=True)[:, : router.top_k]
    weights = likelihoods.gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights, chosen


def load_oracle(
    base: Path, adapter: Path | None = None, dtype: torch.dtype = torch.float64, **options: object
) -> torch.nn.Module:
    """transformers' model, with PEFT's adapter on it. options: more for from_pretrained"""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **options)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).to(dtype)
    return model.eval()


Result = TypeVar("Result")


class Oracle:
    """Answers alone, with one adapter, what a mixed batch must answer too.

    dtype: float64 computes norms in float64 too, which transformers does in float32.
    options: more for from_pretrained, such as quantization_config
    """

    def __init__(self, base: Path, dtype: torch.dtype = torch.float64, **options: object) -> None:
        self.base = load_oracle(base, dtype=dtype, **options)
        if dtype == torch.float64:
            all_in_float64(self.base)
        self.dtype = dtype
        self.peft = None
        self.known: set[str] = set()
        self._answers: dict[tuple, list[int]] = {}  # (adapter, prompt) -> the longest one worked out

    def load(self, name: str, folder: Path) -> None:
        """Read an adapter folder under a name of its own."""
        from peft import PeftModel

        if self.peft is None:
            self.peft = PeftModel.from_pretrained(self.base, folder, adapter_name=name)
        else:
            self.peft.load_adapter(folder, adapter_name=name)
        self.peft.to(self.dtype).eval()
        self.known.add(name)
        self._forget_answers(name)

    def forget(self, name: str) -> None:
        self.peft.delete_adapter(name)
        self.known.remove(name)
        self._forget_answers(name)

    def _forget_answers(self, name: str) -> None:
        self._answers = {key: tokens for key, tokens in self._answers.items() if key[0] != name}

    @torch.inference_mode()
    def call(self, name: str | None, function: Callable[[torch.nn.Module], Result]) -> Result:
        """function(the model with that adapter), None = base. To choose an adapter takes as long as a step."""
        if self.peft is None:
            return function(self.base)
        if name is None:
            with self.peft.disable_adapter():
                return function(self.peft)
        self.peft.set_adapter(name)
        return function(self.peft)

    def logits(self, name: str | None, token_ids: list[list[int]]) -> torch.Tensor:
        """Of texts of one adapter (None = base), padded on the right: (texts, longest, V)"""
        longest = max(map(len, token_ids))
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in token_ids])
        return self.call(name, lambda model: model(padded).logits)

    def greedy(self, name: str | None, prompt: list[int], max_tokens: int) -> list[int]:
        """What is likeliest, token by token, with no end but the length. Worked out once."""
        tokens = self._answers.setdefault((name, *prompt), [])

        def go_on(model: torch.nn.Module) -> None:
            while len(tokens) < max_tokens:
                logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))

        if len(tokens) < max_tokens:
            self.call(name, go_on)
        return tokens[:max_tokens]


def quantization_config():
    """For from_pretrained: what `quantization="torchao"` is here."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))


def quantized_oracle(base: Path, adapters: dict[str, Path], dtype: torch.dtype = torch.float32) -> Oracle:
    """transformers' model, quantized when loaded, with PEFT's adapters, name -> folder, on top of it."""
    oracle = Oracle(base, dtype, quantization_config=quantization_config())
    for name, folder in adapters.items():
        oracle.load(name, folder)
    return oracle


def dequantized_oracle(ours: torch.nn.Module, base: Path, adapters: dict[str, Path]) -> Oracle:
    """transformers and PEFT in float64 on the numbers that our int8 weights stand for.

    A GPU rounds to int8 a little otherwise than a CPU, so a model that was quantized there is another model.
    """
    oracle = Oracle(base)
    for name in quantized_names(ours):
        path = name.removesuffix(".weight")
        parent, _, last = path.removesuffix(".base_layer").rpartition(".")
        parts = ours.packed_modules_mapping.get(last, [last])
        heights = getattr(ours.get_submodule(path), "output_sizes", None)
        weight = ours.get_parameter(name).dequantize().double().cpu()
        for part, rows in zip(parts, weight.split(heights or len(weight)), strict=True):
            oracle.base.get_submodule(f"{parent}.{part}").weight.data = rows
    for name, folder in adapters.items():
        oracle.load(name, folder)
    return oracle


def quantized_names(model: torch.nn.Module) -> set[str]:
    """Of the parameters that are in int8."""
    from torchao.quantization import Int8Tensor

    return {name for name, weight in model.named_parameters() if isinstance(weight, Int8Tensor)}


def stored_bytes(weight: torch.Tensor) -> int:
    """Of a weight, or of all that a quantized one is made of."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    pieces, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, piece).nbytes for piece in pieces)
