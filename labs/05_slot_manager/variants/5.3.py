@property
def lora_index_to_id(self) -> list[int | None]:
    id_of_slot = {slot: adapter_id for adapter_id, slot in self.list_active_adapters().items()}
    return [id_of_slot.get(slot) for slot in range(self.lora_slots)]

def _translate(self, mapping: LoRAMapping) -> None:
    slots = self.lora_index_to_id
    if self._last_mapping is not None and self._last_mapping == (mapping, slots):
        return
    self._last_mapping = None
    self.punica_wrapper.begin_step(mapping, slots)
    self._last_mapping = mapping, slots
