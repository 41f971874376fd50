"""A fleet as a RayService of KubeRay: `python -m deploy.fleet.manifest --config deploy/fleet.yaml`."""

import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from deploy.fleet.arguments import FleetArgs
from minivllm.commands.serve import KEY_VARIABLE

IMPORT_PATH = "deploy.fleet.ray_app:build"
PORT = 8000  # where KubeRay looks for Serve
GIB_OF_HEAD, CPUS_OF_HEAD = 8, 2


def main(
    config: Annotated[Path, typer.Option(help="a YAML file of FleetArgs; its paths are those in the image")],
    image: Annotated[str, typer.Option(help="of deploy/Dockerfile.ray")] = "minivllm-ray:latest",
    claim: Annotated[str, typer.Option(help="PersistentVolumeClaim that is mounted at /models")] = "models",
    gib: Annotated[int, typer.Option(help="memory of an engine's pod")] = 32,
    ray_version: Annotated[
        str, typer.Option(help="in the image; that which is installed here if not given")
    ] = "",
    key_secret: Annotated[
        str, typer.Option(help="Secret with the API's key under `api-key`; without it, everybody is served")
    ] = "",
) -> None:
    """Print the manifest."""
    args = FleetArgs(**yaml.safe_load(config.read_text()))
    service = ray_service(args, image, claim, gib, ray_version or _installed_ray(), key_secret)
    print(as_yaml(service), end="")


def _installed_ray() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        raise typer.BadParameter("Ray is not installed here; give --ray-version, that of the image") from None


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as such, for people."""


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _write_text)


def as_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Blocks, sort_keys=False, width=120)


def serve_config(args: FleetArgs) -> dict[str, Any]:
    """What Ray Serve is told: `serve deploy` takes it as a file, a RayService as text."""
    application = {
        "name": "fleet",
        "import_path": IMPORT_PATH,
        "route_prefix": "/",
        "args": args.model_dump(exclude_defaults=True),
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT},
        "applications": [application],
    }


def ray_service(
    args: FleetArgs, image: str, claim: str, gib: int, ray_version: str, key_secret: str = ""
) -> dict[str, Any]:
    """One pod for the head, which has the server, and one for each engine; with engines come and go their pods.

    key_secret   what has the API's key, for the server
    """
    engine = {"cpu": f"{args.num_cpus:g}", "memory": f"{gib}Gi"}
    if args.num_gpus:
        engine["nvidia.com/gpu"] = str(math.ceil(args.num_gpus))  # a container has whole ones
    head = {"cpu": str(CPUS_OF_HEAD), "memory": f"{GIB_OF_HEAD}Gi"}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "fleet"},
        "spec": {
            "serveConfigV2": as_yaml(serve_config(args)),
            "rayClusterConfig": {
                "rayVersion": ray_version,
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": True,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},  # no engine there
                    "template": pod("ray-head", image, claim, head, key_secret),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "engines",
                        "replicas": args.min_replicas,
                        "minReplicas": args.min_replicas,
                        "maxReplicas": args.max_replicas,
                        "rayStartParams": {},
                        "template": pod("ray-worker", image, claim, engine),
                    }
                ],
            },
        },
    }


def pod(name: str, image: str, claim: str, resources: dict[str, str], key_secret: str = "") -> dict[str, Any]:
    """A pod of one container, with models and adapters to read."""
    container = {
        "name": name,
        "image": image,
        "ports": [{"containerPort": PORT, "name": "serve"}],
        "resources": {"limits": dict(resources), "requests": dict(resources)},
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    }
    if key_secret:
        key = {"secretKeyRef": {"name": key_secret, "key": "api-key"}}
        container["env"] = [{"name": KEY_VARIABLE, "valueFrom": key}]
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return {"spec": {"containers": [container], "volumes": [volume]}}


if __name__ == "__main__":
    typer.run(main)
