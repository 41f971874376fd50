def _wrap_all(self, model: nn.Module, layers: dict[nn.Module, list[str]]) -> None:
    for layer in layers:
        names = layers[layer]
        if not [name for name in names if self._is_wanted(name)]:
            continue
        first = names[0]
        wrapped = self._wrap(model, first, layer)
        self.modules[first] = wrapped
        for name in names:
            replace_submodule(model, wrapped.place_of(name), wrapped)
            parts = self._names_of_parts(name)
            if not parts:
                parts = [name]
            for i, target in enumerate(parts):
                self.targets[target] = (first, i)
        if self._names_of_parts(first):
            self.packed_modules[first] = self._names_of_parts(first)
        self._claim(wrapped, names)
