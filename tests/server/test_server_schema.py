"""schemathesis makes up requests from the server's own schema: none may be a 500, none may stop it."""

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error

from minivllm.assembly import LLMEngine
from tests.worlds.engines import tiny_world
from tests.worlds.servers import client_of, serving
from tests.worlds.waiting import PATIENCE


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    world = tiny_world(tmp_path_factory)
    with serving(world, "qv", "all", lora_root=str(world.folder), allow_runtime_lora=True) as server:
        yield server


def search(server, examples):
    """So many requests to every route; those that fit the schema name a model that is there, so that it has work."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    statuses = set()
    for operation in schema.get_all_operations():
        operation = operation.ok()

        @settings
        @hypothesis.given(case=operation.as_strategy(), known=hypothesis.strategies.booleans())
        def ask(case, known):
            if known and isinstance(case.body, dict):
                case.body |= {"model": "qv"} if "model" in case.body else {}
                case.body |= {"lora_name": "qv"} if "lora_name" in case.body else {}
                case.body |= {"lora_version_timeout": 0.01} if "min_lora_version" in case.body else {}
            response = case.call(timeout=PATIENCE)
            statuses.add(response.status_code)
            if response.status_code == 503 and "did not come within" in response.text:
                return  # nobody brings the version that it asks for
            case.validate_response(response, checks=[not_a_server_error])

        ask()
    return statuses


def assert_whole(server):
    engine: LLMEngine = server.server.state.llm._client.engine
    with client_of(server) as client:
        answer = client.completions.create(model="tiny", prompt="still here", max_tokens=3)

    assert answer.usage.completion_tokens > 0
    assert not engine.has_unfinished_requests()
    assert not engine.scheduler.requests


def test_made_up_requests_find_no_server_error(server):
    statuses = search(server, examples=12)

    assert {200, 400, 404} <= statuses
    assert_whole(server)


@pytest.mark.nightly
def test_many_made_up_requests_find_no_server_error(server):
    search(server, examples=400)

    assert_whole(server)
