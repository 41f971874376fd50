def pin_adapter(self, lora_id: int) -> bool:
    if lora_id not in self._registered_adapters:
        raise ValueError(f"adapter {lora_id} is not in memory, so it cannot be pinned")
    self.activate_adapter(lora_id)
    self.pinned_adapters.add(lora_id)
    return True

def unpin_adapter(self, lora_id: int) -> bool:
    if lora_id not in self.pinned_adapters:
        return False
    self.pinned_adapters.remove(lora_id)
    return True
