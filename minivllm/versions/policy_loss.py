"""What a trainer makes of sampled answers: a loss whose gradient is the policy gradient, for stale answers, too.

vLLM has none; trainers call it truncated importance sampling.
"""

import torch


# region lab 13.4: the loss of answers that an older version sampled
def policy_loss(
    new: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, most: float = 2.0
) -> torch.Tensor:
    """The loss, () float, whose gradient makes answers likelier, the more their advantage is above 0.

    new          (N, T) float: logprobs of the answers' tokens by the weights in training, which a gradient goes to
    sampled      (N, T) float: those that the engine gave them when it sampled them, by whichever version; nan behind an
                 answer's end. What is in `new` there means nothing, be it nan or infinite
    advantages   (N,) float: of each answer, by how much its reward is above what was expected
    most         no token counts more often than this

    The gradient is that of the mean over all tokens of - weight * advantage * new. A token's weight says how much
    likelier it is by now than when it was sampled, at most `most`, and is a number: no gradient goes through it.
    Without a token the loss is 0. No argument is changed.
    """
    there = ~sampled.isnan()  # chosen first: 0 times nan would be nan, in a gradient, too
    ours, theirs = new[there], sampled[there]
    weights = (ours.detach() - theirs).exp().clamp(max=most)
    gains = weights * advantages[:, None].expand(there.shape)[there] * ours
    return -gains.sum() / max(len(ours), 1)


# endregion
