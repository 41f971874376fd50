"""A fleet by Ray Serve itself: two engines in processes of their own, and what happens when one of them is killed."""

import os
import signal
import threading
import time

import httpx
import openai
import pytest
import yaml

from deploy.fleet.arguments import FleetArgs
from deploy.fleet.manifest import serve_config
from tests.worlds.engines import OPTIONS
from tests.worlds.processes import end_process, parent_pid, tokens_made
from tests.worlds.servers import BASE_NAME, GREEDY, Answers, order, text_of

pytestmark = [pytest.mark.nightly, pytest.mark.ray]

PORT = 8719
FAR_CALLS = (parent_pid, tokens_made, end_process)


def args_of(world, **more):
    return FleetArgs(
        model=str(world.base),
        served_model_name=BASE_NAME,
        lora_modules=[f"{name}={world.path(name)}" for name in ("qv", "all")],
        lora_root=str(world.folder),
        allow_runtime_lora=True,
        engine={name: value for name, value in OPTIONS.items() if name != "enable_lora"},
        num_cpus=0.25,
        **more,
    )


@pytest.fixture(scope="module")
def serve(ray):
    from ray import serve

    serve.start(http_options={"port": PORT})
    yield serve
    serve.shutdown()


@pytest.fixture(scope="module")
def fleet(serve, world):
    """The handle of the engines."""
    from deploy.fleet.ray_app import ENGINE, application

    serve.run(application(args_of(world), FAR_CALLS), name="fleet")
    return serve.get_deployment_handle(ENGINE, "fleet")


@pytest.fixture
def client(fleet):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture
def http(fleet):
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def answers(world):
    return Answers(world)


def replicas(fleet):
    """Process ids of the replicas that answer."""
    from ray.serve.exceptions import RayServeException

    try:
        told = fleet.broadcast("ask", "call", parent_pid).results(return_exceptions=True)
    except RayServeException:  # there is none
        return []
    return sorted(pid for pid in told if isinstance(pid, int))


def wait_for(condition, seconds=90):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


class Askers:
    """Threads that ask on and on.   seen: (model, text or the error) of every request that has ended"""

    def __init__(self, client, models, threads=4, **more):
        self.seen, self._stop = [], threading.Event()
        self._ask = lambda model: text_of(client, model, **more)
        self._threads = [threading.Thread(target=self._run, args=(models, i)) for i in range(threads)]

    def _run(self, models, number):
        while not self._stop.is_set():
            number += 1
            model = models[number % len(models)]
            try:
                self.seen.append((model, self._ask(model)))
            except openai.APIError as error:
                self.seen.append((model, error))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a request hangs"


def test_each_name_is_a_model_and_answers_as_peft_does(client, answers):
    listed = [card.id for card in client.models.list()]

    assert listed == [BASE_NAME, "all", "qv"]
    for name in listed:
        assert [text_of(client, name) for _ in range(3)] == [answers.text(name, "a tale")] * 3


def test_an_adapter_that_many_ask_for_at_once_is_answered_by_both_engines(fleet, client, answers):
    before = dict(fleet.broadcast("ask", "call", tokens_made).results())

    asked = client.completions.create(model="qv", prompt=["a tale"] * 30, **{**GREEDY, "max_tokens": 60})

    after = dict(fleet.broadcast("ask", "call", tokens_made).results())
    assert {choice.text for choice in asked.choices} == {answers.text("qv", "a tale", 60)}
    assert sorted(after) == sorted(before)
    assert min(after[pid] - before[pid] for pid in after) >= 8 * 60


def test_a_reload_under_load_is_the_old_adapter_or_the_new_one_and_then_only_the_new_one(
    fleet, client, http, answers, world
):
    order(http, "load", "moving", world.path("mlp")).raise_for_status()
    texts = {name: answers.text(name, "a tale", 12) for name in ("mlp", "patterns")}

    with Askers(client, ["moving"], max_tokens=12) as askers:
        wait_for(lambda: len(askers.seen) > 20)
        for name in ("patterns", "mlp", "patterns"):
            order(http, "load", "moving", world.path(name), load_inplace=True).raise_for_status()
            # Before an answer that begins after the acknowledgement.
            assert text_of(client, "moving", max_tokens=12) == texts[name]

    assert {text for _, text in askers.seen} == set(texts.values())
    assert len(replicas(fleet)) == 2


def test_when_a_replica_is_killed_its_requests_end_with_an_error_and_service_goes_on(fleet, client, answers):
    before = replicas(fleet)
    long = {name: answers.text(name, "a tale", 60) for name in ("qv", "all")}

    with Askers(client, ["qv", "all"], max_tokens=60) as askers:
        wait_for(lambda: len(askers.seen) > 8)
        os.kill(before[0], signal.SIGKILL)
        killed = len(askers.seen)
        wait_for(lambda: len(askers.seen) > killed + 30)

    failed = [error for _, error in askers.seen if isinstance(error, Exception)]
    answered = [(name, text) for name, text in askers.seen if isinstance(text, str)]
    assert all(error.status_code == 503 for error in failed), failed
    assert all(text == long[name] for name, text in answered)
    assert len(answered) > 20
    wait_for(lambda: len(replicas(fleet)) == 2)
    assert before[0] not in replicas(fleet)


def test_a_client_that_asks_again_sees_nothing_of_a_replica_that_is_killed(fleet, client, answers):
    patient = client.with_options(max_retries=5)

    with Askers(patient, ["qv", "all"], max_tokens=60) as askers:
        wait_for(lambda: len(askers.seen) > 8)
        os.kill(replicas(fleet)[0], signal.SIGKILL)
        killed = len(askers.seen)
        wait_for(lambda: len(askers.seen) > killed + 30)

    assert [error for _, error in askers.seen if isinstance(error, Exception)] == []
    wait_for(lambda: len(replicas(fleet)) == 2)


def test_an_engine_that_was_started_later_has_the_adapter_as_it_was_read_again(
    fleet, client, http, answers, world
):
    order(http, "load", "kept", world.path("mlp")).raise_for_status()
    order(http, "load", "kept", world.path("patterns"), load_inplace=True).raise_for_status()
    before = replicas(fleet)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(set(replicas(fleet)) - set(before)) == 2)

    patient = client.with_options(max_retries=5)

    assert {text_of(patient, "kept") for _ in range(6)} == {answers.text("patterns", "a tale")}


def test_more_requests_than_one_engine_is_meant_for_start_another(serve, world, answers):
    from deploy.fleet.ray_app import ENGINE, application

    args = args_of(world, min_replicas=1, max_replicas=2, target_ongoing_requests=1)
    serve.run(application(args, FAR_CALLS), name="growing", route_prefix="/growing")
    growing = serve.get_deployment_handle(ENGINE, "growing")
    url = f"http://127.0.0.1:{PORT}/growing/v1"

    before = len(replicas(growing))
    with (
        openai.OpenAI(base_url=url, api_key="none", timeout=60) as client,
        Askers(client, ["qv"], threads=6, max_tokens=60) as askers,
    ):
        wait_for(lambda: len(replicas(growing)) == 2, seconds=180)
    serve.delete("growing")

    assert before == 1
    assert {text for _, text in askers.seen} == {answers.text("qv", "a tale", 60)}


def test_ray_serve_takes_the_configuration_of_the_manifest(ray):
    from ray.serve.schema import ServeDeploySchema

    config = serve_config(FleetArgs(model="/models/base", num_gpus=1))

    schema = ServeDeploySchema.model_validate(yaml.safe_load(yaml.dump(config)))

    assert schema.applications[0].import_path == "deploy.fleet.ray_app:build"
