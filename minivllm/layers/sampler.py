"""From logits to tokens. Stands for vllm/v1/sample/sampler.py, its ops and vllm/logprobs.py (v0.22.1)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from minivllm.layers.batched_draw import draw_tokens
from minivllm.layers.penalties import TokenHistory, apply_penalties
from minivllm.layers.to_device import to_device, to_host
from minivllm.sampling_params import SamplingParams


@dataclass
class Logprob:
    """What the model thought of one token; vLLM's Logprob.

    logprob: natural logarithm of its probability under the raw logits, before temperature and filters.
    rank: 1 for the likeliest token; tied tokens share a rank.
    decoded_token: the token alone as text, once a tokenizer has seen it.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class SamplerOutput:
    """One token a row; vLLM's SamplerOutput.

    token_ids: (P,) int64, where the logits are
    wait_for_logprobs: gives `logprobs`
    """

    token_ids: torch.Tensor
    wait_for_logprobs: Callable[[], list[dict[int, Logprob] | None]]

    @property
    def logprobs(self) -> list[dict[int, Logprob] | None]:
        """P dicts by token id, the sampled one first, then the likeliest; None where not asked for."""
        return self.wait_for_logprobs()


class Sampler(nn.Module):
    """Picks one token a row; vLLM's Sampler.

    eos_token_ids: what `min_tokens` holds off, beside a request's own stop ids.
    seed: of the generator that rows without a seed of their own share.
    """

    def __init__(self, eos_token_ids: Iterable[int] = (), seed: int = 0) -> None:
        super().__init__()
        self.eos_token_ids = list(eos_token_ids)
        self.generator = torch.Generator().manual_seed(seed)

    def forward(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingParams],
        generators: Sequence[torch.Generator | None],
        num_output_tokens: Sequence[int],
        histories: Sequence[TokenHistory] = (),
        masks: Sequence[torch.Tensor | None] = (),
    ) -> SamplerOutput:
        """Sample every row; a seeded row's token depends on nothing but its logits and its generator.

        On a GPU the host waits for nothing.

        logits: (P, V) of any float dtype, left as they are
        rows, generators, num_output_tokens: P each; what the request asks, its `make_generator` (kept for
            the request's whole life), and how many tokens it has already
        histories: P, the tokens that biases and penalties look at; () where no row asks for any
        masks: P, which tokens a row may take, (V,) bool, None = all; () where no row has any
        """
        allowed = self._hold_off_stops(logits, rows, num_output_tokens)  # (P, V)
        allowed = _masked(allowed, masks)  # (P, V)
        if any(params.changes_logits for params in rows):
            allowed = apply_penalties(allowed, rows, histories)  # (P, V)
        token_ids = allowed.argmax(dim=-1)  # (P,)
        random = [row for row, params in enumerate(rows) if not params.is_greedy]
        if random and logits.is_cuda:
            chosen = [rows[row] for row in random], [generators[row] or self.generator for row in random]
            where = to_device(random, logits.device)
            token_ids[where] = draw_tokens(allowed[where], *chosen)
        else:
            for row in random:
                token_ids[row] = draw_token(allowed[row], rows[row], generators[row] or self.generator)
        return SamplerOutput(token_ids, launch_logprobs(logits, token_ids, rows))

    def _hold_off_stops(
        self, logits: torch.Tensor, rows: Sequence[SamplingParams], num_output_tokens: Sequence[int]
    ) -> torch.Tensor:
        """Logits in which rows short of their min_tokens cannot stop. (P, V) -> (P, V)"""
        early = [i for i, params in enumerate(rows) if num_output_tokens[i] < params.min_tokens]
        if not early:
            return logits
        # An adapter may read tokens of its own for which there are no logits.
        places = [
            (i, token_id)
            for i in early
            for token_id in (*self.eos_token_ids, *rows[i].stop_token_ids)
            if token_id < logits.shape[1]
        ]
        where = to_device(np.array(places, dtype=np.int64).reshape(-1, 2), logits.device)  # (n, 2)
        return logits.index_put(tuple(where.unbind(1)), logits.new_full((), -math.inf))


def _masked(logits: torch.Tensor, masks: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Logits in which rows with a mask have no others. (P, V) -> (P, V), the same where no row has one."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return logits
    barred = torch.zeros(logits.shape, dtype=torch.bool)  # (P, V)
    barred[rows] = ~torch.stack([masks[row] for row in rows])
    return logits.masked_fill(to_device(barred, logits.device), -math.inf)


def make_generator(params: SamplingParams) -> torch.Generator | None:
    """A request's own source of randomness, or None if it has no seed. One number is drawn a token."""
    return None if params.seed is None else torch.Generator().manual_seed(params.seed)


class RepeatableDraws:
    """A request's generator, set by the position of the token to draw. A step that is taken again draws the same."""

    def __init__(self, params: SamplingParams) -> None:
        self._generator = make_generator(params)
        self._position = -1
        self._state: torch.Tensor | None = None

    def at(self, position: int) -> torch.Generator | None:
        """The generator in the state that it had when this position was first drawn; None without a seed.

        A position is the last one or a new one: of earlier ones the state is not kept.
        """
        if self._generator is not None:
            if position == self._position:
                self._generator.set_state(self._state)
            else:
                self._state, self._position = self._generator.get_state(), position
        return self._generator


def token_weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """How much each token weighs in the draw: 0 if filtered out, else its probability times a constant.

    In vLLM's order: temperature, min_p, top_k, then top_p over what these left.
    logits: (V,) -> (V,) float64, so that a cumulative sum over a large vocabulary stays exact
    """
    scaled = logits.double() / params.temperature
    weights = (scaled - scaled.max()).exp()  # the likeliest token weighs 1
    if params.min_p > 0:
        weights[weights < params.min_p] = 0
    if 0 < params.top_k < weights.numel():
        weights[weights < weights.topk(params.top_k).values[-1]] = 0
    if params.top_p < 1:
        _keep_nucleus(weights, params.top_p)
    return weights


def draw_token(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """One token drawn by inverting the cumulative distribution with a single random number.

    logits: (V,)
    """
    cumulative = token_weights(logits, params).cumsum(dim=0)  # (V,)
    uniform = torch.rand((), dtype=torch.float64, generator=generator).item()
    total = cumulative[-1].item()
    if not total >= 1:
        # The likeliest token weighs 1, so these are NaN: an adapter that overflows, say. Its own text is lost
        # whatever is drawn; the rest of the batch must not be.
        return int(logits.argmax())
    # right=True: the first token whose sum is *above* the number, so one of weight 0 is never taken.
    return int(torch.searchsorted(cumulative, uniform * total, right=True))


def _keep_nucleus(weights: torch.Tensor, top_p: float) -> None:
    """Zero all but the smallest set of heaviest tokens that holds `top_p` of the weight.

    Of tied tokens the lower ids stay.
    weights: (V,) float64, changed in place
    """
    total = weights.sum()
    # Tokens lighter than this hold less than 1 - top_p together, so the set lies among the others: of a large
    # vocabulary usually a small part, and much quicker to sort.
    negligible = (1 - top_p) * total / weights.numel()
    candidates = (weights >= negligible).nonzero().squeeze(1)  # (C,)
    heaviest, order = weights[candidates].sort(descending=True, stable=True)  # (C,), (C,)
    weight_before = heaviest.cumsum(dim=0) - heaviest
    nucleus = candidates[order[weight_before < top_p * total]]  # (N,)
    kept = weights[nucleus]
    weights.zero_()[nucleus] = kept


def launch_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[SamplingParams]
) -> Callable[[], list[dict[int, Logprob] | None]]:
    """For the rows that ask: the sampled token's logprob and the likeliest ones'.   logits: (P, V); token_ids: (P,)

    They are on their way to the host when this returns. The call that it gives waits for them.
    """
    asking: dict[int, list[int]] = {}
    for i, params in enumerate(rows):
        if params.logprobs is not None:
            asking.setdefault(params.logprobs, []).append(i)
    launched = []
    for num_logprobs, places in asking.items():
        where = to_device(places, logits.device)
        launched.append((places, launch_top_logprobs(logits[where], token_ids[where], num_logprobs)))

    def collect() -> list[dict[int, Logprob] | None]:
        found: list[dict[int, Logprob] | None] = [None] * len(rows)
        for places, wait in launched:
            for i, logprobs in zip(places, wait()):
                found[i] = logprobs
        return found

    return collect


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> list[dict[int, Logprob]]:
    """For each of n rows: the logprob of its token, then those of the likeliest.   logits: (n, V); token_ids: (n,)"""
    return launch_top_logprobs(logits, token_ids, num_logprobs)()


def launch_top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> Callable[[], list[dict[int, Logprob]]]:
    """As `top_logprobs`, which the call that this gives waits for."""
    logprobs = logits.double().log_softmax(dim=-1)  # (n, V)
    own = logprobs.gather(1, token_ids[:, None])  # (n, 1)
    own_ranks = 1 + (logprobs > own).sum(dim=-1)  # (n,)
    # A request may ask for more than there are, if its adapter reads tokens for which there are no logits.
    top = logprobs.topk(min(num_logprobs, logprobs.shape[1]))  # (n, num_logprobs)
    # Sorted from the top, the first of its equals tells how many tokens are above one.
    ranks = 1 + torch.searchsorted(-top.values, -top.values)  # (n, num_logprobs)
    wait = to_host(token_ids, own.squeeze(1), own_ranks, top.indices, top.values, ranks)

    def collect() -> list[dict[int, Logprob]]:
        found = []
        for token_id, logprob, rank, *others in zip(*(tensor.tolist() for tensor in wait())):
            likeliest = {other: Logprob(*numbers) for other, *numbers in zip(*others)}
            found.append(
                {token_id: Logprob(logprob, rank), **{t: p for t, p in likeliest.items() if t != token_id}}
            )
        return found

    return collect
