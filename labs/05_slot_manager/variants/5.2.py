def activate_adapter(self, lora_id: int) -> bool:
    if lora_id in self._active_adapters:
        self.touch_adapter(lora_id)
        return False
    lora = self.get_adapter(lora_id)
    if lora is None:
        raise ValueError(f"there is no adapter {lora_id} in memory")
    slot = self._find_slot()
    started = time.perf_counter()
    self._write(lora, slot)
    self._active_adapters.put(lora_id, slot)
    self.touch_adapter(lora_id)
    seconds = time.perf_counter() - started
    self.tell("activate", lora_id, slot, seconds=seconds)
    return True
