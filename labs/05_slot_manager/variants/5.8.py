def add_adapter(self, lora_request: LoRARequest) -> bool:
    adapter_id = lora_request.lora_int_id
    if lora_request.load_inplace and self.manager.get_adapter(adapter_id) is not None:
        self.manager.replace_adapter(self._timed_load(lora_request))
    else:
        self._load_if_missing(lora_request)
    self.manager.touch_adapter(adapter_id)
    if self.manager.has_room_for(adapter_id):
        self.manager.activate_adapter(adapter_id)
    return True
