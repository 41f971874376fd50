def may_run(self, request: Request) -> str | None:
    adapter = self.adapters.get(request.adapter_id)
    if adapter is None:
        return None
    generation = request.adapter_generation
    if generation in adapter.reloads:
        return RELOAD_PENDING
    return RELOAD_PENDING if self._in_flight(adapter, before=generation) else None

def _with_reload(self, adapter: Adapter, order: LoRARequest) -> Adapter:
    generation = adapter.generation + 1
    reloads = dict(adapter.reloads)
    reloads[generation] = order
    return replace(adapter, generation=generation, reloads=reloads)

def remove_lora(self, adapter_id: int) -> bool:
    if adapter_id not in self.adapters:
        return False
    self.noted.add(adapter_id)
    self.adapters[adapter_id].leaving = True
    self.settle()
    return True

def settle(self) -> None:
    for adapter in self._noted():
        for generation in sorted(adapter.reloads):
            if self._in_flight(adapter, before=generation):
                continue
            self._reload(adapter, generation)
            adapter.reloads.pop(generation)
        if not adapter.leaving or self._in_flight(adapter):
            continue
        self.worker.remove_adapter(adapter.id)
        self._forget(adapter)

def _reload(self, adapter: Adapter, generation: int) -> None:
    if adapter.id in self.manager.list_adapters():
        self._spare_who_runs()
        order = adapter.reloads[generation]
        try:
            self.worker.add_adapter(order)
        except BaseException as error:
            adapter.failures[generation] = as_fault(error)
            if adapter.generation <= generation:
                adapter.generation = generation + 1

def _in_flight(self, adapter: Adapter, before: int | None = None) -> bool:
    for generation in self.scheduler.in_flight.generations(adapter.id):
        if before is None or generation < before:
            return True
    return False
