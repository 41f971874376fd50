"""/metrics as Prometheus reads it, and the access log; the requests themselves say what the numbers must be."""

import json
import logging
import socket
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minivllm.server.access_log import Record
from minivllm.server.engine_metrics import EngineCollector, EngineSnapshot
from minivllm.server.metrics import ServerMetrics
from tests.tools.nights import by_day
from tests.worlds.engines import greedy
from tests.worlds.processes import hold_after
from tests.worlds.servers import BASE_NAME, client_of, serving
from tests.worlds.waiting import PATIENCE, wait_until

NAMES = ("qv", "all", "mlp", "patterns")
GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
# Whom the requests below name, with how many characters, which are tokens.
ASKED = [(BASE_NAME, 5), ("qv", 3), ("all", 7), ("qv", 9), ("mlp", 4), ("all", 2)]


@pytest.fixture(scope="module", params=by_day([True, False], 2), ids=["process", "thread"])
def samples(world, tmp_path_factory, request):
    """Of streams two tokens at most are there before the first of them is read."""
    go = tmp_path_factory.mktemp("metrics")
    with serving(world, *NAMES, in_a_process=request.param) as server:
        call = server.server.state.llm._client.call
        with client_of(server) as client:
            for i, (model, length) in enumerate(ASKED):
                asked = {"model": model, "prompt": "abcdefghij"[:length], **GREEDY}
                if i % 2:
                    call(hold_after, 3, go / str(i)).result(PATIENCE)
                    chunks = iter(client.completions.create(stream=True, **asked))
                    next(chunks)
                    (go / str(i)).touch()
                    assert list(chunks)
                else:
                    assert client.completions.create(**asked).choices
        yield read(server)


def read(server):
    response = httpx.get(f"{server.url}/metrics", timeout=PATIENCE)
    assert response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(samples, name, **labels):
    return samples[name, tuple(sorted(labels.items()))]


def test_totals_are_those_of_the_requests(samples):
    of_all = {"model_name": BASE_NAME}

    assert value(samples, "vllm:prompt_tokens_total", **of_all) == sum(length for _, length in ASKED)
    assert value(samples, "vllm:generation_tokens_total", **of_all) == 8 * len(ASKED)
    assert value(samples, "vllm:request_success_total", finished_reason="length", **of_all) == len(ASKED)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert value(samples, f"vllm:{name}_count", **of_all) == len(ASKED)
        assert value(samples, f"vllm:{name}_sum", **of_all) > 0
    streamed = len(ASKED) // 2
    assert value(samples, "vllm:inter_token_latency_seconds_count", **of_all) <= 7 * streamed
    assert value(samples, "vllm:inter_token_latency_seconds_count", **of_all) >= 6 * streamed
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(samples, f"vllm:{name}", **of_all) == 0


@pytest.mark.parametrize("adapter", [BASE_NAME, *NAMES])
def test_each_adapter_has_its_own_also_one_without_requests(samples, adapter):
    lengths = [length for name, length in ASKED if name == adapter]

    assert value(samples, "minivllm:adapter_requests_total", adapter=adapter) == len(lengths)
    assert value(samples, "minivllm:adapter_prompt_tokens_total", adapter=adapter) == sum(lengths)
    assert value(samples, "minivllm:adapter_generation_tokens_total", adapter=adapter) == 8 * len(lengths)
    name = "minivllm:adapter_time_to_first_token_seconds_count"
    assert value(samples, name, adapter=adapter) == len(lengths)


def test_loads_and_evictions_are_counted_by_adapter(samples):
    loads = {name: value(samples, "minivllm:adapter_loads_total", adapter=name) for name in NAMES}
    evictions = sum(value(samples, "minivllm:adapter_evictions_total", adapter=name) for name in NAMES)
    activations = sum(value(samples, "minivllm:adapter_activations_total", adapter=name) for name in NAMES)

    assert loads == dict.fromkeys(NAMES, 1)
    assert evictions == activations - 2  # two slots
    assert value(samples, "minivllm:adapter_loads_total", adapter=BASE_NAME) == 0
    assert value(samples, "minivllm:adapters_in_slots", model_name=BASE_NAME) == 2
    assert value(samples, "minivllm:adapters_in_memory", model_name=BASE_NAME) == 4


@pytest.mark.parametrize(
    "name",
    [
        *("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count"),
        *("inter_token_latency_seconds_count", "e2e_request_latency_seconds_count"),
        "request_queue_time_seconds_count",
    ],
)
def test_what_no_request_has_done_yet_is_at_zero(name):
    families = ServerMetrics("tiny").registry.collect()

    values = {sample.name: sample.value for family in families for sample in family.samples}

    assert values[f"vllm:{name}"] == 0


def test_adapters_with_requests_are_named(world):
    engine = world.engine(max_num_seqs=2)
    for number, name in enumerate(["qv", None, "all", "mlp", "all"]):
        engine.add_request(str(number), [5, 6, 7], greedy(), lora_request=world.request(name))
    engine.step()
    collector = EngineCollector("tiny")
    collector.latest = EngineSnapshot.of(engine)

    samples = {s.name: s for family in collector.collect() for s in family.samples}
    labels = {"max_lora": "2", "running_lora_adapters": "qv", "waiting_lora_adapters": "all,mlp"}
    assert samples["vllm:lora_requests_info"].labels == labels
    assert samples["vllm:num_requests_running"].value == 2
    assert samples["vllm:num_requests_waiting"].value == 3
    assert 0 < samples["vllm:kv_cache_usage_perc"].value < 1


def test_a_line_of_the_log_has_client_model_and_tokens(world, caplog):
    caplog.set_level(logging.INFO, logger="minivllm.access")
    with serving(world, "qv") as server:
        with client_of(server) as client:
            client.completions.create(model="qv", prompt="abc", **GREEDY)
        httpx.post(
            f"{server.url}/v1/completions", json={"model": "x\ny 200", "prompt": "x"}, timeout=PATIENCE
        )
        httpx.get(f"{server.url}/no%0Aline", timeout=PATIENCE)

    said = [record.getMessage() for record in caplog.records if record.name == "minivllm.access"]
    assert "POST '/v1/completions' 200 model='qv' prompt=3 answer=8 ttft=" in said[0]
    assert "404 model='x\\ny 200' prompt=0" in said[1]
    assert "'/no\\nline' 404" in said[2]
    assert not any("\n" in line for line in said)


def hang_up(server, body, happens):
    """Ask, and close the connection when something has happened."""
    content = json.dumps(body).encode()
    lines = "POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"
    head = "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode()
    with socket.create_connection(server.socket.getsockname(), timeout=PATIENCE) as sock:
        sock.sendall(head + content)
        wait_until(happens)


@pytest.mark.parametrize("logs", [True, False])
def test_a_request_s_id_comes_back_and_monitors_leave_no_lines(world, caplog, logs):
    caplog.set_level(logging.INFO, logger="minivllm.access")
    with serving(world, log_requests=logs) as server:
        for path in ("/health", "/ping", "/metrics"):
            assert httpx.get(f"{server.url}{path}", timeout=PATIENCE).status_code == 200
        answer = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "a-1"}, timeout=PATIENCE)

    said = [record.getMessage() for record in caplog.records if record.name == "minivllm.access"]
    assert answer.headers["x-request-id"] == "a-1"
    assert ["/v1/models" in line and "id='a-1'" in line for line in said] == [True] * logs


def said_of_answers(caplog):
    return [record.getMessage() for record in caplog.records if "completions" in record.getMessage()]


@pytest.mark.parametrize(
    ("prompts", "n", "stream"),
    [(["abcde"], 3, False), (["abcde", "fg"], 1, True), (["abcde", "fg"], 3, False)],
)
def test_a_request_whose_client_leaves_is_counted_as_far_as_it_has_come(world, caplog, prompts, n, stream):
    """The engine's own count is the oracle. It stands still between the client's leaving and the abort."""
    caplog.set_level(logging.INFO, logger="minivllm.access")
    body = {"model": "qv", "prompt": prompts, "n": n, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    with serving(world, "qv", "all") as server:
        engine, held, go_on = server.server.state.llm._client.engine, threading.Event(), threading.Event()

        def hold(scheduled):
            """All that the steps before this one have made is delivered."""
            if engine.scheduler.num_sampled_tokens >= 50:
                held.set()
                go_on.wait(PATIENCE)

        engine.listeners.append(hold)
        hang_up(server, body, held.is_set)
        wait_until(lambda: said_of_answers(caplog))
        made = engine.scheduler.num_sampled_tokens
        go_on.set()
        wait_until(lambda: not engine.has_unfinished_requests())
        samples = read(server)

    assert value(samples, "vllm:generation_tokens_total", model_name=BASE_NAME) == made
    assert value(samples, "minivllm:adapter_generation_tokens_total", adapter="qv") == made
    length = sum(map(len, prompts))
    assert value(samples, "vllm:prompt_tokens_total", model_name=BASE_NAME) == length
    assert value(samples, "minivllm:adapter_prompt_tokens_total", adapter="qv") == length
    assert value(samples, "minivllm:adapter_requests_total", adapter="qv") == len(prompts)
    aborted = {"finished_reason": "abort", "model_name": BASE_NAME}
    assert value(samples, "vllm:request_success_total", **aborted) == n * len(prompts)
    assert value(samples, "vllm:time_to_first_token_seconds_count", model_name=BASE_NAME) == len(prompts)
    assert value(samples, "minivllm:adapter_requests_total", adapter="all") == 0
    [line] = said_of_answers(caplog)
    assert f"POST '/v1/completions' 499 model='qv' prompt={length} answer={made} ttft=" in line


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_whose_client_leaves_before_its_first_token_is_counted(world, caplog, stream):
    caplog.set_level(logging.INFO, logger="minivllm.access")
    body = {"model": "qv", "prompt": "abcde", "stream": stream}
    with serving(world, "qv") as server:
        llm, go_on = server.server.state.llm, threading.Event()
        llm._client.call(lambda engine: go_on.wait(PATIENCE))  # no step is taken meanwhile
        hang_up(server, body, lambda: llm._open)
        wait_until(lambda: said_of_answers(caplog))
        go_on.set()
        samples = read(server)

    assert value(samples, "minivllm:adapter_requests_total", adapter="qv") == 1
    assert value(samples, "minivllm:adapter_generation_tokens_total", adapter="qv") == 0
    aborted = {"finished_reason": "abort", "model_name": BASE_NAME}
    assert value(samples, "vllm:request_success_total", **aborted) == 1
    [line] = said_of_answers(caplog)
    assert "POST '/v1/completions' 499 model='qv' prompt=0 answer=0 total=" in line


def test_a_request_whose_client_leaves_is_counted_where_the_engine_is_a_process(world, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="minivllm.access")
    body = {"model": "qv", "prompt": "abcde", "max_tokens": 110, "ignore_eos": True}
    with serving(world, "qv", in_a_process=True) as server:
        client, go_on = server.server.state.llm._client, tmp_path / "go on"
        client.call(hold_after, 3, go_on)

        def two_tokens_are_there():
            outputs = [sink.last for sink, _ in list(client._requests.values()) if sink.last is not None]
            return any(len(output.outputs[0].token_ids) == 2 for output in outputs)

        hang_up(server, body, two_tokens_are_there)
        wait_until(lambda: said_of_answers(caplog))
        go_on.touch()
        samples = read(server)

    assert value(samples, "minivllm:adapter_generation_tokens_total", adapter="qv") == 2
    assert value(samples, "minivllm:adapter_prompt_tokens_total", adapter="qv") == 5
    assert value(samples, "minivllm:adapter_requests_total", adapter="qv") == 1
    assert "499 model='qv' prompt=5 answer=2 " in said_of_answers(caplog)[0]


def test_a_line_counts_from_the_beginning_of_its_request():
    record = Record(10.0, "qv", 3, 5, first_token_at=10.25, status=200)

    scope = {"method": "POST", "path": "/v1/completions", "client": ("1.2.3.4", 5), "headers": []}
    line = record.line(scope, 12.0)

    assert line == (
        "1.2.3.4 POST '/v1/completions' 200 model='qv' prompt=3 answer=5 ttft=0.250s total=2.000s"
    )
