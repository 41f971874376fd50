"""Keys of a request's blocks, by who computed them. In vLLM a part of vllm/v1/core/kv_cache_utils.py (v0.22.1)."""

from collections.abc import Callable, Sequence

from minivllm.core.request import Request

BASE_IDENTITY = 0


# region lab 12.2: whose block it is
def block_hashes(
    request: Request,
    num_blocks: int,
    block_size: int,
    hash_tokens: Callable[[bytes | None, Sequence[int], int], bytes],
) -> list[bytes]:
    """Keys of the first `num_blocks` blocks of a request, all of them full. In vLLM, of `_gen_lora_extra_hash_keys`.

    request         its tokens before `adapter_start` are the base model's (BASE_IDENTITY), all others belong to
                    `cache_identity`: a load of its adapter; None = it is not known which. Of a request of the base
                    model that is BASE_IDENTITY, and `adapter_start` is 0
    hash_tokens     (key of all that comes before, tokens, who computed them) -> key, as `hash_block_tokens`

    Requests have the same key for a block if all tokens up to its end are the same, each computed by the same one, and
    else never. Where it is not known who computed a block, the list ends before it.

    Keys are kept in the request's `block_hashes`, because tokens only ever follow; the list that is returned is new.
    """
    hashes, start = request.block_hashes, request.adapter_start
    if request.cache_identity is None:
        num_blocks = min(num_blocks, start // block_size)
    for i in range(len(hashes), num_blocks):
        first, end = i * block_size, (i + 1) * block_size
        border = min(max(first, start), end)
        key = hashes[-1] if hashes else None
        # The block in which the adapter begins is hashed as two: the same tokens may have their border elsewhere.
        if border > first:
            key = hash_tokens(key, request.all_token_ids[first:border], BASE_IDENTITY)
        if border < end:
            key = hash_tokens(key, request.all_token_ids[border:end], request.cache_identity)
        hashes.append(key)
    return hashes[:num_blocks]


# endregion
