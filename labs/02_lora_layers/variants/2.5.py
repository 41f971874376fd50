def _wrap_all(self, model: nn.Module, layers: Layers) -> None:
    for layer in layers:
        names = layers[layer]
        if not [name for name in names if self._is_wanted(name)]:
            continue
        first = names[0]
        wrapped = self._wrap(model, first, layer)
        self.modules[first] = wrapped
        for name in names:
            replace_submodule(model, wrapped.place_of(name), wrapped)
            targets = self._names_of_slices(name, wrapped)
            for i, target in enumerate(targets):
                wrapped.targets[target] = i
            for target in [*targets, *wrapped.also_called(name)]:
                self.claims[target] = first
