"""What Kubernetes and Compose are given, checked without either."""

import json
import re
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from typer.testing import CliRunner

from deploy.fleet import manifest
from deploy.fleet.arguments import FleetArgs

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCHEMA = json.loads((Path(__file__).parent / "rayservice.schema.json").read_text())
FLEET = {"model": "/models/base", "num_cpus": 4}


def rendered(**args):
    return manifest.ray_service(FleetArgs(**FLEET, **args), "image:1", "claim", 16, "2.60.0")


@pytest.mark.parametrize("args", [{}, {"num_gpus": 1, "max_replicas": 9}, {"lora_modules": ["a=/models/a"]}])
def test_a_rendered_service_is_one_that_kuberay_takes(args):
    service = yaml.safe_load(manifest.as_yaml(rendered(**args)))

    jsonschema_rs.validate(SCHEMA, service)
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert FleetArgs(**application["args"]) == FleetArgs(**FLEET, **args)


def test_the_schema_refuses_a_field_that_kuberay_does_not_know():
    service = rendered()
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 3

    with pytest.raises(jsonschema_rs.ValidationError, match="maxReplica"):
        jsonschema_rs.validate(SCHEMA, service)


def test_a_pod_has_room_for_one_engine_and_there_may_be_as_many_as_engines():
    service = rendered(num_gpus=1, min_replicas=3, max_replicas=5)

    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert (group["minReplicas"], group["maxReplicas"]) == (3, 5)
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}


def test_an_engine_that_takes_half_a_gpu_gets_a_pod_with_one():
    service = rendered(num_gpus=0.5)

    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_servers_pod_alone_has_the_key_and_from_a_secret():
    service = manifest.ray_service(FleetArgs(**FLEET), "image:1", "claim", 16, "2.60.0", "fleet-key")

    jsonschema_rs.validate(SCHEMA, service)
    cluster = service["spec"]["rayClusterConfig"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    (variable,) = head["env"]
    assert variable["name"] == "MINIVLLM_API_KEY"
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "fleet-key", "key": "api-key"}}
    (engine,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert "env" not in engine
    assert "api_keys" not in service["spec"]["serveConfigV2"]


def test_without_ray_the_command_asks_for_its_version(monkeypatch):
    def missing(name):
        raise manifest.PackageNotFoundError(name)

    monkeypatch.setattr(manifest, "version", missing)
    result = CliRunner().invoke(_app(), ["--config", str(DEPLOY / "fleet.yaml")])

    assert result.exit_code == 2
    assert "give --ray-version" in " ".join(result.output.replace("│", " ").split())


def test_the_manifest_that_lies_there_is_what_its_command_prints():
    result = CliRunner().invoke(
        _app(), ["--config", str(DEPLOY / "fleet.yaml"), "--ray-version", _ray_version()]
    )

    assert result.exit_code == 0, result.output
    assert result.stdout == (DEPLOY / "rayservice.yaml").read_text()


def _app():
    import typer

    app = typer.Typer()
    app.command()(manifest.main)
    return app


def _ray_version():
    """The release that pyproject.toml asks for."""
    text = (DEPLOY.parent / "pyproject.toml").read_text()
    return re.search(r'"ray\[serve\]>=(\d+\.\d+)', text)[1] + ".0"


def test_compose_starts_a_head_with_the_server_and_two_engines_that_have_the_cpus_it_asks_for():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())

    args = FleetArgs(**yaml.safe_load(compose["configs"]["fleet"]["content"]))
    head, engine = compose["services"]["head"], compose["services"]["engine"]
    assert head["command"][:2] == ["sh", "-c"]
    assert "python -m deploy.fleet --join --host 0.0.0.0 --config /fleet.yaml" in head["command"][2]
    assert head["configs"] == [{"source": "fleet", "target": "/fleet.yaml"}]
    assert engine["deploy"]["replicas"] == args.min_replicas == 2
    assert f"--num-cpus={args.num_cpus:g}" in engine["command"]
    for service in (head, engine):
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["volumes"][0].endswith(":/models:ro")
