"""One wrapped linear on a backend, with adapters coming and going, and what it should answer in float64."""

import torch
from per_token import choose, random_tensor

from minivllm.config import LoRAConfig
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.lora.backend import Backend
from minivllm.lora.loops_backend import LoopsBackend
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.runs_backend import RunsBackend
from minivllm.vllm.punica_selector import get_punica_wrapper
from minivllm.vllm.utils import from_layer
from tests.oracles.rows import assert_rows_equal
from tests.tools.memory import ScatteredSlots


class OpByOp(RunsBackend):
    """The grouped backend's shrink and expand under the product that all backends share."""

    linear = Backend.linear


class ScatteredRuns(RunsBackend):
    """The grouped backend, A and B of every slot in the worst place."""

    def place(self, slots, base):
        return ScatteredSlots(torch.float64).place(super().place(slots, base), base)


class ScatteredLoops(LoopsBackend):
    """Loops over slots that a backend has moved to the worst place."""

    def __init__(self, *args):
        super().__init__(*args)
        self.place = ScatteredSlots(torch.float64).place


class ScatteredOpByOp(OpByOp):
    """Runs over slots that a backend has moved to the worst place."""

    def __init__(self, *args):
        super().__init__(*args)
        self.place = ScatteredSlots(torch.float64).place


def make_wrapper(name):
    """The backend under vLLM's names."""
    return get_punica_wrapper(64, 16, "cpu", lora_config=LoRAConfig(punica_backend=name))


def make_backend(name):
    if name in ("loops", "grouped", "auto"):
        return make_wrapper(name).backend
    made = {
        "scattered grouped": ScatteredRuns,
        "op by op": OpByOp,
        "scattered loops": ScatteredLoops,
        "scattered op by op": ScatteredOpByOp,
    }
    return made[name]("cpu")


class MixedLayer:
    """A wrapped linear, a slot table, and the adapters that its slots should hold.

    held: slot -> list of (A, B) or None, one a slice; slots without an entry are free
    """

    def __init__(self, backend, base, parts, slots=3, rank=8, lora_dtype="auto", seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        for parameter in base.parameters():
            parameter.data = random_tensor(self.generator, *parameter.shape, dtype=parameter.dtype)
        config = LoRAConfig(max_lora_rank=rank, max_loras=slots, lora_dtype=lora_dtype)
        self.base, self.rank, self.slots = base, rank, slots
        self.layer = from_layer(base, slots, config, parts)
        self.punica = backend
        self.layer.set_mapping(backend)
        self.held = {}
        self.table = [None] * slots

    @classmethod
    def random(cls, backend, seed, dtype=torch.float64):
        """Of one to three slices, all sizes random, 1 among them."""
        generator = torch.Generator().manual_seed(seed)
        width = choose(generator, [1, 3, 8, 17])
        outputs = [choose(generator, [1, 2, 5, 12]) for _ in range(3)]
        heads, size = choose(generator, [1, 2, 4]), choose(generator, [1, 3])
        base, parts = choose(
            generator,
            [
                (RowParallelLinear(width, outputs[0], params_dtype=dtype), []),
                (MergedColumnParallelLinear(width, outputs[:2], params_dtype=dtype), ["gate", "up"]),
                (MergedColumnParallelLinear(width, outputs[:2], bias=False, params_dtype=dtype), ["whole"]),
                (QKVParallelLinear(width, size, heads, 1, params_dtype=dtype), ["q", "k", "v"]),
            ],
        )
        slots, rank = choose(generator, [1, 2, 4]), choose(generator, [1, 2, 5, 8])
        return cls(backend, base, parts, slots, rank, seed=seed)

    def put(self, slot, adapter_id, ranks=None, dtype=torch.float64):
        """A random adapter into a slot; a rank of 0 leaves the slice out."""
        sizes = self.layer.output_slices
        if ranks is None:
            ranks = [choose(self.generator, [0, 1, self.rank, max(1, self.rank - 1)]) for _ in sizes]
        pairs = [
            (
                random_tensor(self.generator, rank, self.layer.input_size, dtype=dtype),
                random_tensor(self.generator, size, rank, dtype=dtype),
            )
            if rank
            else None
            for rank, size in zip(ranks, sizes, strict=True)
        ]
        lora_a, lora_b = ([pair and pair[side] for pair in pairs] for side in (0, 1))
        self.layer.set_lora(slot, lora_a, lora_b)
        self.held[slot], self.table[slot] = pairs, adapter_id

    def clear(self, slot):
        self.layer.reset_lora(slot)
        self.held.pop(slot, None)
        self.table[slot] = None

    def step(self, ids):
        """Tell the backend which adapter each row of the coming pass has."""
        self.punica.begin_step(LoRAMapping(ids, ids), list(self.table))

    def inputs(self, rows):
        return random_tensor(self.generator, rows, self.layer.input_size, dtype=self.base.weight.dtype)

    @torch.inference_mode()
    def run(self, x):
        y = self.layer(x)[0]
        assert isinstance(y, torch.Tensor), f"linear returned {y!r}, not the (T, N) output"
        return y

    @torch.inference_mode()
    def base_output(self, x):
        return self.base(x)[0]

    def expected(self, x, ids):
        """Row by row: W · x + bias, and B · (A · x) of the row's own adapter, all in float64."""
        rows = []
        for row, adapter_id in zip(x.double(), ids, strict=True):
            y = self.base.weight.double() @ row
            if self.base.bias is not None:
                y = y + self.base.bias.double()
            if adapter_id:
                y = y + torch.cat([self._added(pair, size, row) for pair, size in self._slices(adapter_id)])
            rows.append(y)
        return torch.stack(rows)

    def assert_answers(self, x, ids, tolerance):
        """A pass over x gives every row what `expected` says; returns what it gave.

        tolerance   as a share of the largest value expected
        """
        y = self.run(x)
        assert_rows_equal(y, self.expected(x, ids), labels=self.labels(ids), tolerance=tolerance)
        return y

    def labels(self, ids):
        """Whose each row is."""
        return [f"adapter {i} in slot {self.table.index(i)}" if i else "a base row" for i in ids]

    def _slices(self, adapter_id):
        pairs = self.held[self.table.index(adapter_id)]
        return zip(pairs, self.layer.output_slices, strict=True)

    @staticmethod
    def _added(pair, size, row):
        if pair is None:
            return torch.zeros(size, dtype=torch.float64)
        lora_a, lora_b = pair
        return lora_b.double() @ (lora_a.double() @ row)
