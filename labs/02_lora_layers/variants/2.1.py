def __init__(self, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> None:
    self.a = tuple(a)
    self.b = tuple(b)
    self.beside = {}
    slots = self.a[0].shape[0]
    self.live_ranks = [[0 for _ in range(slots)] for _ in self.a]
    self.versions = [0 for _ in range(slots)]
    self._live = {}

@classmethod
def empty(
    cls,
    slots: int,
    rank: int,
    sizes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device | str,
    experts: int = 1,
) -> "Slots":
    a, b = [], []
    for width, height in sizes:
        a.append(torch.zeros((slots, experts, rank, width), dtype=dtype, device=device))
        b.append(torch.zeros((slots, experts, height, rank), dtype=dtype, device=device))
    return cls(a, b)
