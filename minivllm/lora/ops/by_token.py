"""Shrink and expand, token by token: small, slow, and easy to believe. Stands for vllm/lora/ops/torch_ops (v0.22.1).

T tokens, K input width, N output width, S slots, R rank of the slots. Weights are (S, out, in) or (S, 1, out, in).
Products are summed in the widest dtype of input, weights and output, and rounded once, when they are written.

In every op a slot of -1 is a base row. Base rows of the output are left as they are: what the base layer has written
there is the base model's answer, and no adapter may add to it.
"""

import functools

import torch


def matrices(weights: torch.Tensor) -> torch.Tensor:
    """One matrix a slot, however the slots are stored.   (S, 1, out, in) or (S, out, in) -> (S, out, in)"""
    return weights.squeeze(1) if weights.ndim == 4 else weights  # (S, out, in)


def widest_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype to sum in, so that nothing is rounded twice."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


# region lab 3.2: shrink, one token at a time
def bgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """Each row's own A · x, times `scaling`, in the first R columns of its row of the output.

    inputs: (T, K) float    lora_a_weights: (S, R, K) or (S, 1, R, K) float    output_tensor: (T, >=R) float
    lora_indices_tensor: (T,) int slot of each token, -1 = base row

    Nothing else is written, and what a slot holds that no row has, NaN perhaps, changes nothing. The three dtypes may
    differ: no number is rounded to less than the widest of them before it is written.

    A matrix in use is copied once at most, to convert it, and no other is. At K = 4096 and R = 16 a copy for each of
    2,000 rows is 524 MB.

    By hand, scaling 3, A of slot 1 is [[1 2] [0 -1]], and the output is 7 everywhere:

        slots [1 -1]   x = [4 5]   output = [42 -15 7]
                           [4 5]            [ 7   7 7]

    To work out: x = [1 1/256] in float32, A = [[1 1]] and the output in bfloat16, whose numbers from 1 to 2 are 1/128
    apart, and from 2 to 4 1/64. What is written, at a scaling of 3?
    """
    lora_a = matrices(lora_a_weights)  # (S, R, K)
    rank, dtype = lora_a.shape[1], widest_dtype(inputs, lora_a, output_tensor)
    slots = lora_indices_tensor.tolist()
    wide = {slot: lora_a[slot].to(dtype) for slot in set(slots) if slot >= 0}
    for token, slot in enumerate(slots):
        if slot >= 0:
            shrunk = wide[slot] @ inputs[token].to(dtype)  # (R,)
            output_tensor[token, :rank] = scaling * shrunk


# endregion


# region lab 3.3: expand into a slice, one token at a time
def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """output[t, offset:offset+size] (+)= B[slot of t] · inputs[t]. Other columns are left as they are.

    inputs: (T, >=R) float    lora_b_weights: (S, >=size, R) or (S, 1, >=size, R) float    output_tensor: (T, N) float
    lora_indices_tensor: (T,) int slot of each token, -1 = base row
    add_inputs  add to what the output holds, or replace it
    """
    lora_b = matrices(lora_b_weights)[:, :slice_size]  # (S, size, R)
    rank, dtype = lora_b.shape[2], widest_dtype(inputs, lora_b, output_tensor)
    columns = slice(slice_offset, slice_offset + slice_size)
    for token, slot in enumerate(lora_indices_tensor.tolist()):
        if slot >= 0:
            expanded = lora_b[slot].to(dtype) @ inputs[token, :rank].to(dtype)  # (size,)
            kept = output_tensor[token, columns] if add_inputs else 0
            output_tensor[token, columns] = kept + expanded


# endregion
