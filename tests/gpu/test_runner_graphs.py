"""Steps from static buffers answer as eager steps do: padding, refills, the choice of graph.

Steps of decodes and steps with prompts ("mixed") have graphs of their own. Without a GPU a "captured" step just runs
again, through Triton's interpreter, on the buffers it was made for.
"""

import gc
import itertools

import pytest

from minivllm import SamplingParams
from minivllm.assembly import make_scheduler, parts_of
from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueues
from minivllm.gpu import cuda_graphs
from minivllm.gpu.cuda_graphs import capture_sizes, mixed_sizes
from minivllm.gpu.step_graphs import NO_ADAPTERS
from tests.tools.device import needs_cuda, no_waiting
from tests.tools.nights import without_gpu_at_night
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.gpu import (
    MIXED,
    add_requests,
    assert_tokens_are_right,
    compare_with_eager,
    graphed_engine,
    watch_replays,
)
from tests.worlds.models import token_ids

both_kinds = pytest.mark.parametrize("kind", without_gpu_at_night(["decodes"], "mixed"))


def engine_of(world, kind, **options):
    """Whose steps of this kind are captured."""
    if kind == "mixed":
        options = {"max_num_batched_tokens": 40, **options}
    return graphed_engine(world, kind, **options)


def decode_only_steps(engine):
    """Rows of every step that held nothing but decodes."""
    records = engine.trace.records
    return [len(record.rows) for record in records if all(row.kind == "decode" for row in record.rows)]


def prompt_steps(engine):
    """Every step that held a prompt of more than one token; the last of a prompt, alone, is as good as a decode."""
    return [record for record in engine.trace.records if any(row.tokens > 1 for row in record.rows)]


# ---- decodes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", without_gpu_at_night(["auto"], "triton"))
def test_padded_steps_give_the_tokens_of_each_request_alone(world, backend):
    engine = engine_of(world, "decodes", punica_backend=backend)

    add_requests(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    assert [size for size, _ in engine.replayed] == [
        {1: 1, 2: 2, 3: 4, 4: 4, 5: 6}[rows] for rows in decode_only_steps(engine)
    ]
    assert len({size for size, _ in engine.replayed}) == 4, "the batch did not pass through all sizes"


@pytest.mark.nightly_without_gpu
def test_the_highest_slot_counts_beside_base_rows_in_a_captured_step(world):
    """Incident 13: as many adapters as slots, and base rows that the count forgot."""
    engine = engine_of(world, "decodes", punica_backend="triton", max_loras=2, max_num_seqs=3)
    names = ["mlp", None, "all"]

    add_requests(engine, world, names)
    outputs = run(engine)

    full = [
        record
        for record in engine.trace.records
        if len(record.rows) == 3 and all(row.kind == "decode" for row in record.rows)
    ]
    assert full and all(None not in record.slots for record in full), "no step had every slot in use"
    assert engine.replayed.count((3, True)) == len(full)
    assert_tokens_are_right(world, outputs, names)


def test_without_lora_there_is_one_set_of_graphs(world):
    engine = engine_of(world, "decodes", enable_lora=False)

    add_requests(engine, world, [None] * 2, max_tokens=2)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, [None] * 2, max_tokens=2)
    graphs = engine.runner.graphs
    assert [shape.tokens for shape in graphs.decodes] == [1, 2, 4, 6]
    assert graphs.steps.keys() == {(shape, NO_ADAPTERS) for shape in graphs.decodes}


@pytest.mark.nightly_without_gpu
def test_prompts_and_chunks_run_eagerly_beside_decodes(world):
    engine = engine_of(world, "decodes", max_num_batched_tokens=5)

    add_requests(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    # The last token of a prompt may come alone, and is then computed as a decode is.
    alone = [r for r in engine.trace.records if all(row.tokens == 1 for row in r.rows)]
    assert len(decode_only_steps(engine)) <= len(engine.replayed) <= len(alone) < len(engine.trace)


def test_a_row_that_may_not_stop_yet_does_not(world):
    """The likeliest token that the graph has found may be one that `min_tokens` forbids."""
    prompt = token_ids(6, 1)
    second = world.oracle().greedy("qv", prompt, 2)[1]
    engine = engine_of(world, "decodes")

    params = greedy(4, min_tokens=3, stop_token_ids=[second])
    engine.add_request("a", prompt, params, lora_request=world.request("qv"))
    tokens = tokens_of(run(engine)["a"])

    assert second not in tokens[:3]


def test_no_garbage_of_an_earlier_engine_is_freed_while_a_step_is_captured():
    """That would break the capture."""
    with cuda_graphs.no_garbage_collection():
        assert not gc.isenabled()

    assert gc.isenabled()


def test_sizes_are_close_where_padding_costs_most_and_end_with_the_largest_batch():
    small = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128]

    assert capture_sizes(128) == small
    assert capture_sizes(200) == [*small, 160, 192, 200]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(1) == [1]


def test_capturing_leaves_no_adapter_behind_and_no_graph_has_more_rows_than_a_step_tokens(world):
    engine = engine_of(world, "decodes", max_num_batched_tokens=3)

    info = engine.debug_info()

    assert info["slots"] == [None] * 4 and info["adapters"] == []
    assert [shape.tokens for shape in engine.runner.graphs.decodes] == [1, 2, 3]


# ---- prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", without_gpu_at_night(["auto"], "triton"))
def test_prompts_and_decodes_in_one_graph_give_the_tokens_of_each_request_alone(world, backend):
    engine = engine_of(world, "mixed", punica_backend=backend, max_num_batched_tokens=20)

    add_requests(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    assert len(engine.replayed) == len(prompt_steps(engine)) > 2
    assert any(record.rows[0].kind == "decode" != record.rows[-1].kind for record in engine.trace.records)


def test_no_step_that_somebody_decodes_in_is_too_large_for_a_graph(world, monkeypatch):
    """Prompts of 30 tokens that come one step after the other: alone they would be eager, beside a decode chunked."""
    monkeypatch.setattr(cuda_graphs, "MOST_TOKENS", 16)
    engine = engine_of(world, "mixed", max_num_batched_tokens=64)
    engine.scheduler = bounded = make_scheduler(parts_of(engine.config), engine.runner, RequestQueues(), None)
    prompts = [token_ids(30, seed) for seed in range(3)]
    outputs = []
    for number, prompt in enumerate(prompts):
        bounded.add_request(Request(str(number), prompt, greedy(6)))
        outputs.append(bounded.schedule())
        bounded.update_from_output(outputs[-1], {s.request.request_id: [1] for s in outputs[-1].scheduled})

    assert [[s.num_new_tokens for s in output.scheduled] for output in outputs] == [[30], [1, 15], [1, 15]]


def test_a_found_prefix_is_read_from_the_cache(world):
    engine = engine_of(world, "mixed")
    prompt = token_ids(21, 5)
    engine.add_request("first", prompt, greedy(3), lora_request=world.request("qv"))
    run(engine)

    engine.add_request("second", [*prompt, 7], greedy(3), lora_request=world.request("qv"))
    output = run(engine)["second"]

    assert output.num_cached_tokens == 20
    assert tokens_of(output) == world.oracle().greedy("qv", [*prompt, 7], 3)
    assert len(engine.replayed) == 2


def test_steps_that_are_too_large_or_want_many_logits_run_eagerly(world):
    engine = engine_of(world, "mixed", max_num_batched_tokens=60)
    graphs = engine.runner.graphs
    graphs.mixed = [shape for shape in graphs.mixed if shape.tokens < 60]
    wishes = {"large": (token_ids(50, 1), {}), "logprobs": (token_ids(9, 2), {"prompt_logprobs": 1})}

    for name, (prompt, params) in wishes.items():
        engine.add_request(name, prompt, greedy(2, **params))
        tokens = tokens_of(run(engine)[name])
        assert tokens == world.oracle().greedy(None, prompt, 2)

    assert engine.replayed == []


def test_sizes_end_with_the_largest_step_and_pad_by_a_third_at_most():
    sizes = mixed_sizes(8192)

    assert sizes[-1] == 1024
    assert mixed_sizes(100) == [32, 64, 96, 100]
    assert mixed_sizes(20) == [20]
    assert all(larger - size <= max(32, size // 3) for size, larger in itertools.pairwise(sizes))
    assert 448 not in sizes, "on an H100 it takes longer than 512"


# ---- both ---------------------------------------------------------------------------------------------------


@both_kinds
def test_a_step_without_adapters_runs_without_a_trace_of_lora(world, kind):
    engine = engine_of(world, kind)

    for names in (["qv", None], [None, None], ["mlp", "qv"]):
        add_requests(engine, world, names, max_tokens=2)
        assert_tokens_are_right(world, run(engine), names, max_tokens=2)

    with_lora = [bool(adapters) for _, adapters in engine.replayed]
    assert [has for has, _ in itertools.groupby(with_lora)] == [True, False, True]


@both_kinds
@pytest.mark.nightly_without_gpu
def test_requests_that_lose_their_blocks_and_get_others_are_read_anew(world, kind):
    engine = engine_of(world, kind, num_kv_blocks=11, enable_prefix_caching=False)
    names = [None, "qv", "all"]

    add_requests(engine, world, names, max_tokens=8)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, names, max_tokens=8)
    assert engine.get_metrics()["scheduler"]["num_preemptions"] > 0
    assert engine.replayed


WISHES = {
    "sampled": {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "greedy": {"temperature": 0},
}


@pytest.mark.parametrize("kind", ["mixed", pytest.param("decodes", marks=pytest.mark.nightly_without_gpu)])
def test_rows_that_want_more_than_the_likeliest_token_get_it_from_the_logits(world, kind):
    outputs = []
    for kinds in ([kind], []):
        engine = graphed_engine(world, *kinds, max_num_batched_tokens=40)
        for i, (wish, asked) in enumerate(WISHES.items()):
            params = SamplingParams(max_tokens=3, ignore_eos=True, **asked)
            engine.add_request(wish, token_ids(6, i), params, lora_request=world.request("all"))
        outputs.append(run(engine))
        assert bool(engine.replayed) == bool(kinds)

    for wish in WISHES:
        graphed, eager = (output[wish].outputs[0] for output in outputs)
        assert graphed.token_ids == eager.token_ids
        assert (graphed.logprobs is not None) == (wish == "logprobs")
        for one, other in zip(graphed.logprobs or [], eager.logprobs or [], strict=True):
            assert one.keys() == other.keys()
            assert all(abs(one[token].logprob - other[token].logprob) < 1e-4 for token in one)


@pytest.mark.parametrize(
    ("kind", "steps", "replayed", "tokens", "samples"),
    [
        pytest.param(
            *("decodes", 2, (4, True), [0, 1, 2, -1], [0, 1, 2, -1]),
            marks=pytest.mark.nightly_without_gpu,
        ),
        ("mixed", 1, (32, True), [0] * 3 + [1] * 7 + [2] * 11 + [-1] * 11, [0, 1, 2, -1, -1, -1]),
    ],
    ids=["decodes", "mixed"],
)
def test_the_backend_is_told_that_padding_is_base(world, kind, steps, replayed, tokens, samples):
    """Else the rows of a larger step before would still be some adapter's, and cost it its kernels' time. Tokens and
    samples are padded apart."""
    engine = engine_of(world, kind, punica_backend="triton")

    add_requests(engine, world, ["qv", "all", "mlp"])
    for _ in range(steps):
        engine.step()

    punica = engine.runner.lora_manager.manager.punica_wrapper
    assert engine.replayed == [replayed]
    assert punica.token_lora_indices.tolist() == tokens
    assert punica.sampler_indices.tolist() == samples


@needs_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["triton", "paged"])
@both_kinds
def test_on_a_gpu_graphs_give_the_logits_of_eager_steps(world, kind, dtype, backend):
    engine = world.engine(
        device="cuda",
        dtype=dtype,
        max_loras=4,
        punica_backend=backend,
        warm_up=True,
        async_scheduling=False,  # eager steps want tokens
        **({"max_num_batched_tokens": 20} if kind == "mixed" else {}),
    )
    watch_replays(engine, kind)
    compare_with_eager(engine, 0.05, kind)

    add_requests(engine, world, MIXED)
    run(engine)

    expected = decode_only_steps(engine) if kind == "decodes" else prompt_steps(engine)
    assert len(engine.replayed) == len(expected) > 0


@needs_cuda
def test_on_a_gpu_a_step_of_prompts_is_launched_without_waiting(world):
    engine = world.engine(device="cuda", dtype="bfloat16", max_loras=4, warm_up=True)
    launch = engine.runner.launch_model

    def launch_and_not_wait(output):
        with no_waiting():
            return launch(output)

    add_requests(engine, world, ["qv", "all"])
    engine.step()  # loads the adapters
    engine.runner.launch_model = launch_and_not_wait
    engine.add_request("late", token_ids(12, 9), greedy(3), lora_request=world.request("qv"))

    assert len(run(engine)) == 3


@needs_cuda
def test_on_a_gpu_all_sampled_rows_are_drawn_together(world):
    """The numbers come from the same CPU generators, so the tokens are the CPU's."""
    answers = []
    for device in ("cpu", "cuda"):
        engine = world.engine(device=device, dtype="float32", max_loras=4)
        for i in range(6):
            params = SamplingParams(
                temperature=1.2, seed=i, top_p=0.9, top_k=30, max_tokens=6, ignore_eos=True
            )
            engine.add_request(str(i), token_ids(6, i), params)
        answers.append({i: tokens_of(output) for i, output in run(engine).items()})

    assert answers[0] == answers[1]


@needs_cuda
def test_on_a_gpu_the_cache_takes_what_is_left_and_no_more_than_is_useful(world):
    engine = world.engine(
        device="cuda", dtype="float16", num_kv_blocks=None, max_num_seqs=4, max_model_len=64
    )

    assert engine.runner.num_blocks == 4 * 64 // 4 + 1
