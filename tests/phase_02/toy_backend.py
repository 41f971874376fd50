"""A backend written from `Backend`'s docstrings alone: plain float loops over tokens."""

from minivllm.lora.backend import ALL_SLICES, Backend


class ToyBackend(Backend):
    """Python floats, one at a time; slow enough to be believed."""

    def add(self, y, x, slots, rows, slices=ALL_SLICES):
        first = 0
        for a, b in zip(slots.a[slices], slots.b[slices]):
            for row, adapter in enumerate(rows.tolist()):
                if adapter >= 0:
                    slot, expert = divmod(adapter, a.shape[1])
                    h = [dot(line, x[row].tolist()) for line in a[slot, expert].tolist()]
                    added_to(y[row, first:], b[slot, expert].tolist(), h)
            first += b.shape[2]

    def expand(self, y, h, slots, rows):
        for row, adapter in enumerate(rows.tolist()):
            if adapter >= 0:
                added_to(y[row], slots.b[0][adapter, 0].tolist(), h[row].tolist())


def added_to(y, matrix, h):
    for column, line in enumerate(matrix):
        y[column] += dot(line, h)


def dot(left, right):
    return sum(p * q for p, q in zip(left, right))
