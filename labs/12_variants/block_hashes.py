"""Keys of a request's blocks, by who computed them. In vLLM a part of vllm/v1/core/kv_cache_utils.py (v0.22.1)."""

from labs.kit.overlay import Todo
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

    To use: `block_hashes`, `adapter_start`, `cache_identity` and `all_token_ids` of the request
    (minivllm/core/request.py).
    """
    raise Todo("lab 12.2: whose block it is")


# endregion
