@classmethod
def takes(cls, layer: nn.Module, parts: int) -> bool:
    for kind, expected in cls.wraps.items():
        if kind is type(layer):
            return expected is None or parts == expected
    return False

def _slice_widths(self, base_layer: LinearBase) -> tuple[int, ...]:
    parts = None
    for kind, number in self.wraps.items():
        if isinstance(base_layer, kind):
            parts = number
            break
    if parts in (None, 1):
        return (base_layer.output_size,)
    return tuple(base_layer.output_sizes)
