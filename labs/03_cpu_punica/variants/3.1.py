def slots_of(ids: tuple[int, ...], lora_index_to_id: list[int | None]) -> list[int]:
    slot_of_id = {}
    for slot, adapter in enumerate(lora_index_to_id):
        if adapter is not None:
            slot_of_id[adapter] = slot
    slot_of_id[0] = -1
    missing = sorted({adapter for adapter in ids if adapter not in slot_of_id})
    if missing:
        raise ValueError(f"no slot holds {missing}; they hold {lora_index_to_id}")
    return list(map(slot_of_id.__getitem__, ids))
