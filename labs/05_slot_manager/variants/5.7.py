def _apply_adapters(self, requests: Iterable[LoRARequest]) -> None:
    wanted = self._claim(requests)
    for adapter_id in wanted:
        self._load_if_missing(wanted[adapter_id])
        if self.manager.activate_adapter(adapter_id):
            self.manager.tell("miss", adapter_id)
        else:
            self.manager.tell("hit", adapter_id)

def _claim(self, requests: Iterable[LoRARequest]) -> dict[int, LoRARequest]:
    wanted = self._distinct(requests)
    self.manager.in_use = frozenset(wanted)
    return wanted

def prepare_adapters(self, requests: Iterable[LoRARequest]) -> dict[int, BaseException]:
    wanted = self._claim(requests)
    failures = {}
    for adapter_id in wanted:
        try:
            self._load_if_missing(wanted[adapter_id])
        except BaseException as error:
            failures[adapter_id] = as_fault(error)
    return failures
