"""The two ends of a model: each row of a mixed batch against float64 arithmetic with its own adapter.

Every adapter is in one slot and none of its numbers in another's. Slot BROKEN holds NaN and no row's adapter: what
reads a slot that is not a row's own shows it.
"""

import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.ranks import ONE_RANK
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.vllm.layers import LogitsProcessorWithLoRA, LoRAMapping, VocabParallelEmbeddingWithLoRA
from minivllm.vllm.punica_selector import get_punica_wrapper
from tests.oracles.backends import NaivePunica
from tests.oracles.rows import assert_rows_equal
from tests.tools.device import DEVICE
from tests.tools.watching import NewTensors
from tests.worlds.ranks import in_lockstep

VOCAB, HIDDEN, RANK, SLOTS = 23, 12, 5, 5
BROKEN = 0  # where a base row's -1 ends up when it is clamped
RANKS = {1: 5, 2: 0, 3: 1, 4: 3}  # slot -> rank of its adapter; 0 = it only adds tokens, where any may
ADDED = {1: 1, 2: 3, 3: 0, 4: 2}  # slot -> how many tokens its adapter adds, where any may
EXTRA = 3
BACKENDS = ["loops", "grouped", "triton"]
# The interpreter's kernels sum in float32, whatever the dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}


def randn(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def device_of(backend):
    """Kernels run on the GPU where there is one."""
    return DEVICE if backend == "triton" else "cpu"


class Ends:
    """What both layers have in common: the slots' adapters, and a backend that knows which row has which.

    extra   tokens that an adapter may add, X
    tp      which of several processes has the layer
    """

    inputs_of_a: int
    outputs_of_b: int

    def __init__(self, backend=None, dtype=torch.float64, extra=0, tp=ONE_RANK):
        self.dtype, self.extra, self.device, self.tp = dtype, extra, device_of(backend), tp
        self.config = LoRAConfig(RANK, SLOTS, lora_extra_vocab_size=extra, punica_backend=backend or "auto")
        self.punica = NaivePunica()
        if backend:
            self.punica = get_punica_wrapper(64, 64, self.device, lora_config=self.config)
        self.layer = self.make()
        self.layer.set_mapping(self.punica)
        self.a, self.b, self.new = {}, {}, {}
        nan = torch.tensor(float("nan"), dtype=dtype)
        self.write(
            BROKEN,
            nan.expand(RANK, self.inputs_of_a),
            nan.expand(self.outputs_of_b, RANK),
            nan.expand(extra, HIDDEN),
        )
        for slot in RANKS:
            self.put(slot, slot)

    def write(self, slot, lora_a, lora_b, new):
        weights = LoRALayerWeights("end", len(lora_a), 1, lora_a, lora_b, scaling=1)
        if len(new):
            weights.beside |= {"embeddings": new, "is_added": new.new_ones(len(new), 1)}
        (own,) = self.layer.share.of([weights])
        self.layer.write(slot, own)

    def put(self, slot, seed):
        """The adapter of RANKS and ADDED into its slot, its numbers by seed."""
        rank, added = RANKS[slot], min(self.extra, ADDED[slot])
        self.a[slot] = randn(rank, self.inputs_of_a, seed=10 * seed, dtype=self.dtype)
        self.b[slot] = randn(self.outputs_of_b, rank, seed=10 * seed + 1, dtype=self.dtype)
        self.new[slot] = randn(added, HIDDEN, seed=10 * seed + 2, dtype=self.dtype)
        self.write(slot, self.a[slot], self.b[slot], self.new[slot])

    def step(self, token_slots, sample_slots=None):
        """Which slot each token has, and each sampled row; None = every token is sampled."""
        if isinstance(self.punica, NaivePunica):
            self.punica.token_slot_list, self.punica.sampled = token_slots, sample_slots
            return
        ids = [tuple(slot + 1 for slot in slots) for slots in (token_slots, sample_slots or token_slots)]
        self.punica.update_metadata(LoRAMapping(*ids), list(range(1, SLOTS + 1)), SLOTS + 1, VOCAB)


class Embedding(Ends):
    @property
    def inputs_of_a(self):
        return VOCAB + self.extra

    outputs_of_b = HIDDEN

    def make(self):
        base = VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=self.dtype, tp=self.tp)
        self.weight = randn(VOCAB, HIDDEN, seed=1, dtype=self.dtype)
        base.weight.data = self.tp.own_tokens(self.weight).to(self.device)
        layer = VocabParallelEmbeddingWithLoRA(base)
        layer.create_lora_weights(SLOTS, self.config)
        return layer

    @torch.inference_mode()
    def run(self, ids):
        y = self.layer(torch.tensor(ids, device=self.device))
        assert isinstance(y, torch.Tensor), f"forward returned {y!r}, not the (T, H) embeddings"
        return y.cpu()

    def expected(self, ids, slots):
        rows = []
        for token, slot in zip(ids, slots, strict=True):
            row = self.weight[token] if token < VOCAB else self.new[slot][token - VOCAB]
            row = row.double()
            if slot >= 0:
                row = row + self.b[slot].double() @ self.a[slot][:, token].double()
            rows.append(row)
        return torch.stack(rows)

    def assert_answers(self, ids, slots, sample_slots=None):
        self.step(slots, sample_slots)
        labels = [f"token {token}, slot {slot}" for token, slot in zip(ids, slots, strict=True)]
        got, expected = self.run(ids), self.expected(ids, slots)
        assert got.dtype == self.dtype
        assert_rows_equal(got, expected, labels=labels, tolerance=TOLERANCE[self.dtype], what="embeddings")


class Logits(Ends):
    inputs_of_a = HIDDEN

    @property
    def outputs_of_b(self):
        return VOCAB + self.extra

    def make(self):
        self.head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=self.dtype, tp=self.tp)
        self.weight = randn(VOCAB, HIDDEN, seed=1, dtype=self.dtype)
        self.head.weight.data = self.tp.own_tokens(self.weight).to(self.device)
        base = LogitsProcessor(VOCAB, self.tp)
        layer = LogitsProcessorWithLoRA(base, HIDDEN, self.dtype, self.device, None)
        layer.create_lora_weights(SLOTS, self.config)
        return layer

    @torch.inference_mode()
    def run(self, hidden_states, embedding_bias=None):
        bias = None if embedding_bias is None else embedding_bias.to(self.device)
        return self.layer._get_logits(hidden_states.to(self.device), self.head, bias).cpu()

    def expected(self, hidden_states, slots, embedding_bias=None):
        rows = []
        for row, slot in zip(hidden_states.double(), slots, strict=True):
            logits = torch.full((VOCAB + self.extra,), -torch.inf, dtype=torch.float64)
            logits[:VOCAB] = self.weight.double() @ row
            if embedding_bias is not None:
                logits[:VOCAB] += embedding_bias.double()
            if slot >= 0:
                logits[VOCAB : VOCAB + len(self.new[slot])] = self.new[slot].double() @ row
                logits += self.b[slot].double() @ (self.a[slot].double() @ row)
            rows.append(logits)
        return torch.stack(rows)

    def assert_answers(self, hidden_states, token_slots, sample_slots=None, embedding_bias=None):
        self.step(token_slots, sample_slots)
        slots = token_slots if sample_slots is None else sample_slots
        labels = [f"slot {slot}" for slot in slots]
        got = self.run(hidden_states, embedding_bias)
        expected = self.expected(hidden_states, slots, embedding_bias)
        assert got.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        infinite = expected.isinf()
        assert_rows_equal(got.isinf(), infinite, labels=labels, what="tokens that an adapter does not add")
        finite = [t.masked_fill(infinite, 0) for t in (got, expected)]
        assert_rows_equal(*finite, labels=labels, tolerance=tolerance, what="logits")


def some_slots(rows, seed, lowest=-1):
    """Every adapter and the base, in no order, but never the broken slot."""
    generator = torch.Generator().manual_seed(seed)
    choices = [-1, *RANKS] if lowest < 0 else list(RANKS)
    return [choices[i] for i in torch.randint(len(choices), (rows,), generator=generator)]


def some_tokens(slots, seed, extra=0):
    """A token for each row that it may have: its own adapter's among them."""
    generator = torch.Generator().manual_seed(seed)
    known = [VOCAB + (min(extra, ADDED[slot]) if slot >= 0 else 0) for slot in slots]
    return [int(torch.randint(n, (), generator=generator)) for n in known]


def backend_and_dtype(backends):
    """Cases of one test: with the stand-in for a learner who has no backend yet, with the real ones for us."""
    return [
        pytest.param(backend, dtype, id=f"{backend or 'stand-in'}-{str(dtype)[6:]}")
        for backend in backends
        for dtype in TOLERANCE
        if backend != "triton" or dtype != torch.float64
    ]


def refuse(punica, *names):
    """A call of one of these is an error."""

    def refused(*args, **kwargs):
        raise AssertionError("the backend was asked for what this batch does not need")

    for name in names:
        setattr(punica, name, refused)


# Batches of tokens, the slot of each, and the slots of the rows that are sampled where that is something else.
EMBEDDED = {
    "the same token for every adapter": [([7] * 8, [3, -1, 1, 1, 4, -1, 2, 3])],
    "the first and the last of the vocabulary": [
        ([0, VOCAB - 1, 0, VOCAB - 1, VOCAB - 1], [4, 4, 1, -1, 3]),
    ],
    "prompts, of which one row is sampled": [([7, 8, 7, 9, 8, 7], [4, 4, 4, -1, 1, 1], [4, -1, 1])],
    "one row alone": [([5], [slot]) for slot in RANKS],
}
# The slots of a batch's tokens, and of the rows that are sampled.
SAMPLED = {
    "prompts of many tokens": [([3, 3, 3, -1, -1, 1, 1, 1, 1, 4, 4, 2], [3, -1, 1, 4, 2])],
    "a prompt in chunks that is not sampled yet": [([1, 1, 4, -1, 3, 3, 3], [4, -1])],
    "base rows only": [([1, 1, -1, -1, -1], [-1, -1])],
    "one row alone": [([slot], [slot]) for slot in RANKS],
}


class EmbeddingTests:
    """Each with and without room for added tokens."""

    def test_every_token_gets_its_own_adapter(self, backend, dtype, extra):
        embedding = Embedding(backend, dtype, extra)
        slots = some_slots(30, seed=1)

        embedding.assert_answers(some_tokens(slots, 2, extra), slots)

    @pytest.mark.parametrize("case", EMBEDDED)
    def test_every_token_gets_its_own_adapter_in(self, backend, dtype, extra, case):
        embedding = Embedding(backend, dtype, extra)

        for batch in EMBEDDED[case]:
            embedding.assert_answers(*batch)

        assert torch.equal(embedding.layer.weight.cpu(), embedding.weight), "the base weight was written to"

    def test_a_batch_without_adapters_is_the_base_layers(self, backend, dtype, extra):
        embedding = Embedding(backend, dtype, extra)
        ids = some_tokens([-1] * 6, 4)

        embedding.step([-1] * 6)

        assert torch.equal(embedding.run(ids), embedding.weight[ids])


class LogitsTests:
    def test_every_row_gets_its_own_adapter(self, backend, dtype, extra):
        logits = Logits(backend, dtype, extra)
        slots = some_slots(20, seed=3)

        logits.assert_answers(randn(20, HIDDEN, seed=4, dtype=dtype), slots)

    @pytest.mark.parametrize("case", SAMPLED)
    def test_the_rows_are_those_that_are_sampled_and_not_the_batchs_tokens(self, backend, dtype, extra, case):
        logits = Logits(backend, dtype, extra)

        for token_slots, sample_slots in SAMPLED[case]:
            rows = randn(len(sample_slots), HIDDEN, seed=5, dtype=dtype)
            logits.assert_answers(rows, token_slots, sample_slots)

    def test_a_bias_of_the_base_models_stays(self, backend, dtype, extra):
        logits = Logits(backend, dtype, extra)
        bias = randn(VOCAB, seed=7, dtype=dtype)

        logits.assert_answers(randn(3, HIDDEN, seed=8, dtype=dtype), [1, -1, 4], embedding_bias=bias)

    def test_a_batch_without_adapters_is_the_base_layers(self, backend, dtype, extra):
        logits = Logits(backend, dtype, extra)
        hidden_states = randn(6, HIDDEN, seed=9, dtype=dtype)

        logits.step([-1] * 6)

        base = logits.layer.base_layer(logits.head, hidden_states.to(logits.device))
        assert torch.equal(logits.run(hidden_states), base.cpu())


@pytest.mark.lab("2.8")
@pytest.mark.parametrize("extra", [0, EXTRA])
@pytest.mark.parametrize(("backend", "dtype"), backend_and_dtype([None]))
class TestAnEmbeddingOnTheStandIn(EmbeddingTests):
    def test_a_batch_without_adapters_asks_the_backend_for_nothing_more(self, backend, dtype, extra):
        embedding = Embedding(backend, dtype, extra)
        embedding.step([-1, -1])
        refuse(embedding.punica, "token_slots", "token_rows", "expand")

        embedding.run([3, 4])


@pytest.mark.parametrize("extra", [0, EXTRA])
@pytest.mark.parametrize(("backend", "dtype"), backend_and_dtype(BACKENDS))
class TestAnEmbedding(EmbeddingTests):
    pass


@pytest.mark.lab("2.9")
@pytest.mark.parametrize("extra", [0, EXTRA])
@pytest.mark.parametrize(("backend", "dtype"), backend_and_dtype([None]))
class TestLogitsOnTheStandIn(LogitsTests):
    def test_a_batch_without_adapters_asks_the_backend_for_nothing_more(self, backend, dtype, extra):
        logits = Logits(backend, dtype, extra)
        logits.step([-1, -1])
        refuse(logits.punica, "sample_slots", "sample_rows", "add")

        logits.run(randn(2, HIDDEN, seed=9, dtype=dtype))

    def test_what_a_head_computes_beside_its_weight_is_kept(self, backend, dtype, extra):
        """Such as a bias, or a weight in int8: the head is asked for its logits, not read."""
        logits = Logits(backend, dtype, extra)
        hidden_states = randn(2, HIDDEN, seed=9, dtype=dtype)
        logits.step([1, -1])
        plain = logits.run(hidden_states)
        logits.head.bias = torch.nn.Parameter(randn(VOCAB, seed=3, dtype=dtype), requires_grad=False)

        got = logits.run(hidden_states)

        with_bias = plain[:, :VOCAB] + logits.head.bias
        assert_rows_equal(got[:, :VOCAB], with_bias, labels=["slot 1", "slot -1"], tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("extra", [0, EXTRA])
@pytest.mark.parametrize(("backend", "dtype"), backend_and_dtype(BACKENDS))
class TestLogits(LogitsTests):
    pass


@pytest.mark.parametrize("end", [Embedding, Logits])
def test_a_slot_that_is_written_again_keeps_nothing_of_the_last_adapter(end):
    """Rank 5 and a token, then none of either, then rank 3 and two tokens."""
    layer = end("grouped", extra=EXTRA)
    ids = torch.tensor([2, VOCAB, 9]).tolist()
    hidden_states = randn(3, HIDDEN, seed=4)

    for source in (1, 3, 4, 2, 1):
        rank, added = RANKS[source], ADDED[source]
        layer.write(1, layer.a[source], layer.b[source], layer.new[source])
        layer.a[1], layer.b[1], layer.new[1] = layer.a[source], layer.b[source], layer.new[source]
        if end is Logits:
            layer.assert_answers(hidden_states, [1, 1, 1])
        else:
            layer.assert_answers([ids[0], ids[1] if added else 4, ids[2]], [1, 1, 1])
        assert layer.layer.slots.live_ranks[0][1] == rank
        layer.put(1, 1)

    layer.layer.reset_lora(1)
    for buffer in layer.layer.slots.memory:
        assert not buffer[1].any()


def test_tokens_that_the_last_adapter_added_are_gone_with_it():
    logits = Logits("grouped", extra=EXTRA)
    logits.layer.reset_lora(4)
    logits.new[4] = logits.new[4][:0]
    logits.a[4], logits.b[4] = logits.a[4][:0], logits.b[4][:, :0]

    logits.assert_answers(randn(2, HIDDEN, seed=1), [4, 1])


@pytest.mark.lab("2.8")
@pytest.mark.parametrize(
    ("dtype", "lora_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_embeddings_have_the_models_dtype_whatever_the_slots(dtype, lora_dtype):
    config = LoRAConfig(RANK, 2, lora_extra_vocab_size=EXTRA, lora_dtype=lora_dtype)
    base = VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=dtype)
    base.weight.data = randn(VOCAB, HIDDEN, seed=1, dtype=dtype)
    layer = VocabParallelEmbeddingWithLoRA(base)
    layer.create_lora_weights(2, config)
    layer.set_mapping(NaivePunica([1, -1, 1]))
    layer.embeddings_tensors[1, 2] = new = randn(HIDDEN, seed=2, dtype=lora_dtype)

    y = layer(torch.tensor([4, 7, VOCAB + 2]))

    assert y.dtype == dtype
    expected = torch.stack([base.weight[4], base.weight[7], new.to(dtype)])
    assert_rows_equal(y, expected, labels=["a token", "a base token", "an added token"], what="embeddings")


class ShapesOnly(NaivePunica):
    """Rows on the device "meta", which has shapes only, as a stand-in for a GPU."""

    def sample_slots(self, samples):
        return torch.empty(samples, dtype=torch.long, device="meta")

    sample_rows = sample_slots

    def add(self, *args):
        pass


@pytest.mark.lab("2.9")
def test_logits_of_added_tokens_are_computed_where_the_rows_are():
    config = LoRAConfig(RANK, 2, lora_extra_vocab_size=EXTRA)
    head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.float32).to("meta")
    layer = LogitsProcessorWithLoRA(LogitsProcessor(VOCAB), HIDDEN, torch.float32, "meta", None)
    layer.create_lora_weights(2, config)
    layer.set_mapping(ShapesOnly([1, -1, 0]))

    with NewTensors() as made:
        logits = layer._get_logits(torch.empty(3, HIDDEN, device="meta"), head)

    assert logits.shape == (3, VOCAB + EXTRA)
    assert set(made.devices) == {"meta"}, f"new tensors are made on {made.devices}"


both_ends = pytest.mark.parametrize(
    "end",
    [
        pytest.param(Embedding, marks=pytest.mark.lab("2.8")),
        pytest.param(Logits, marks=pytest.mark.lab("2.9")),
    ],
)


def assert_some_answers(layer, slots):
    """Of rows with these slots, the same tokens or hidden states whatever the slots are."""
    if isinstance(layer, Logits):
        layer.assert_answers(randn(len(slots), HIDDEN, seed=4), slots)
    else:
        layer.assert_answers([2, 5, 9, 7, 3][: len(slots)], slots)


@both_ends
def test_slot_0_is_one_like_the_others(end):
    layer = end(extra=EXTRA)
    layer.a[0], layer.b[0], layer.new[0] = 2 * layer.a[4], -layer.b[4], 3 * layer.new[4]
    layer.write(0, layer.a[0], layer.b[0], layer.new[0])

    assert_some_answers(layer, [0, -1, 1, 0])
    if end is Embedding:
        layer.assert_answers([VOCAB + 1, 4, VOCAB], [0, -1, 1])


@both_ends
def test_a_batch_may_have_fewer_rows_than_the_step_was_told_of(end):
    """A step that was captured is told of as many rows as its graph has."""
    layer = end(extra=EXTRA)
    told, slots = [4, -1, 1, 2, 3], [4, -1, 1]
    layer.step(told)

    layer.step = lambda *slots: None
    assert_some_answers(layer, slots)


@both_ends
def test_nothing_is_added_when_no_adapter_of_the_step_has_weights_here(end):
    layer = end(extra=EXTRA)
    layer.punica.reaches = lambda slots: False
    refuse(layer.punica, "add", "expand")

    assert_some_answers(layer, [2, -1, 2])


@both_ends
def test_the_backend_is_asked_about_the_slots_of_this_layer(end):
    layer = end(extra=EXTRA)
    layer.punica.reaches = lambda slots: slots is layer.layer.slots

    assert_some_answers(layer, [4, -1, 1])


@pytest.mark.lab("2.9")
def test_a_bias_of_the_base_models_stays_in_a_batch_without_adapters():
    logits = Logits()

    logits.assert_answers(randn(3, HIDDEN, seed=8), [-1, -1, -1], embedding_bias=randn(VOCAB, seed=7))


# 23 tokens are no equal shares for either.
processes = pytest.mark.parametrize("size", [2, 3])
room = pytest.mark.parametrize("extra", [0, EXTRA])


@pytest.mark.lab("2.8")
@processes
@room
def test_processes_that_share_an_embedding_answer_as_one_and_meet_once(size, extra):
    def work(tp):
        embedding, slots = Embedding(extra=extra, tp=tp), some_slots(30, seed=1)
        embedding.assert_answers(some_tokens(slots, 2, extra), slots)
        embedding.assert_answers([0, VOCAB - 1, 7], [-1, -1, -1])
        return tp.calls

    assert in_lockstep(size, work) == [[("all_reduce", 30 * HIDDEN), ("all_reduce", 3 * HIDDEN)]] * size


@pytest.mark.lab("2.9")
@processes
@room
def test_processes_that_share_a_head_answer_as_one_and_meet_once(size, extra):
    def work(tp):
        logits, slots = Logits(extra=extra, tp=tp), some_slots(20, seed=3)
        bias = randn(VOCAB, seed=7)
        logits.assert_answers(randn(20, HIDDEN, seed=4), slots, embedding_bias=bias)
        return tp.calls

    share = -(-VOCAB // size)
    assert in_lockstep(size, work) == [[("all_gather", 20 * share)]] * size


@pytest.mark.lab("2.9")
def test_logits_have_the_models_dtype_whatever_the_slots():
    config = LoRAConfig(RANK, 2, lora_extra_vocab_size=EXTRA, lora_dtype="float64")
    head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.float32)
    head.weight.data = randn(VOCAB, HIDDEN, seed=1, dtype=torch.float32)
    layer = LogitsProcessorWithLoRA(LogitsProcessor(VOCAB), HIDDEN, torch.float32, torch.device("cpu"), None)
    layer.create_lora_weights(2, config)
    layer.set_mapping(NaivePunica([1, -1]))
    new, hidden_states = randn(HIDDEN, seed=2), randn(2, HIDDEN, seed=3, dtype=torch.float32)
    lora_a, lora_b = randn(1, HIDDEN, seed=4), torch.zeros(VOCAB + EXTRA, 1, dtype=torch.float64)
    weights = LoRALayerWeights("end", 1, 1, lora_a, lora_b, scaling=1)
    weights.beside |= {"embeddings": new[None], "is_added": torch.ones(1, 1, dtype=torch.float64)}
    layer.slots.write(1, [weights])

    logits = layer._get_logits(hidden_states, head, None)

    assert logits.dtype == torch.float32
    assert_rows_equal(logits[:, :VOCAB], hidden_states @ head.weight.T, tolerance=1e-6, what="logits")
    expected = [(hidden_states[0].double() @ new).item(), -torch.inf]
    assert logits[:, VOCAB].tolist() == pytest.approx(expected), "logits of the added token, by row"
