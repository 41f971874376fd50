def accept(self, lora: LoRAModel) -> None:
    if lora.is_accepted:
        return
    found, unknown = {}, []
    for name, weights in lora.loras.items():
        if name in self.claims:
            module = self.claims[name]
            if module not in found:
                found[module] = {}
            found[module][name] = weights
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(unmatched(unknown, list(self.claims), self.lora_config.target_modules))
    given = [name for name in lora.beside if name in self.givers]
    for name in given:
        self.givers[name](lora, found)
    accepted = {}
    for module, weights in found.items():
        accepted[module] = self.modules[module].accept(weights)
    lora.loras = accepted
    for name in given:
        lora.beside.pop(name)
    lora.is_accepted = True

def write(self, lora: LoRAModel, slot: int) -> None:
    try:
        for name in self.modules:
            weights = lora.get_lora(name)
            if weights is not None:
                self.modules[name].write(slot, weights)
            else:
                self.modules[name].clear(slot)
    except BaseException:
        for name in self.modules:
            self.modules[name].clear(slot)
        raise
