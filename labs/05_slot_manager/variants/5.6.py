def replace_adapter(self, adapter: LoRAModel) -> None:
    adapter_id = adapter.id
    old = self.get_adapter(adapter_id)
    if old is None:
        raise ValueError(f"there is no adapter {adapter_id} whose weights could be replaced")
    self.wrapped.accept(adapter)
    self._take(adapter)
    was_pinned, was_active = adapter_id in self.pinned_adapters, adapter_id in self._active_adapters
    try:
        self.deactivate_adapter(adapter_id)
        self._registered_adapters.put(adapter_id, adapter)
        if was_active:
            self.activate_adapter(adapter_id)
    except BaseException:
        self._registered_adapters.put(adapter_id, old)
        if was_pinned:
            self.pin_adapter(adapter_id)
        raise
    if was_pinned:
        self.pin_adapter(adapter_id)
