def hash_block_tokens(parent: bytes | None, token_ids: Sequence[int], identity: int) -> bytes:
    if parent is None:
        parent = bytes(16)
    numbers = array("q", [identity])
    numbers.extend(token_ids)
    return blake2b(parent + numbers.tobytes(), digest_size=16).digest()

def get_computed_blocks(self, request: Request) -> list[int]:
    identity = self._identity(request)
    if identity is None or not self.enable_caching:
        return []
    self._bind(request, identity)
    blocks = []
    whole = (request.num_tokens - 1) // self.block_size
    for block_hash in self._block_hashes(request, whole):
        block = self.block_pool.get_cached_block(block_hash)
        if block is None:
            return blocks
        blocks.append(block)
    return blocks

def _identity(self, request: Request) -> int | None:
    if request.adapter_id == 0:
        return BASE_IDENTITY
    return self.adapter_identity(request.adapter_id)
