"""`python -m deploy.fleet`: a fleet on this machine, until Ctrl-C. On several, Ray starts it (docs/deploy.md)."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import ray
import typer
import yaml
from ray import serve

from deploy.fleet.arguments import FleetArgs
from deploy.fleet.ray_app import build

OBJECT_STORE_BYTES = 200 * 10**6  # answers go from one process to another, and none is large


def main(
    config: Annotated[
        Path | None,
        typer.Option(help="a YAML file of FleetArgs; without it, the demo model and its adapters"),
    ] = None,
    host: Annotated[str, typer.Option(help="where it listens")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="where it listens")] = 8000,
    cpus: Annotated[int, typer.Option(help="that Ray shares out; an engine takes `num_cpus` of them")] = 2,
    join: Annotated[bool, typer.Option(help="the Ray that runs on this machine, and start none")] = False,
) -> None:
    """Serve until a signal says otherwise."""
    args = FleetArgs(**yaml.safe_load(config.read_text())) if config else FleetArgs(lora_modules=["demo"])
    if join:
        ray.init(address="auto")
    else:
        args.check_cpus(cpus)
        start_ray(cpus)
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(build(args), name="fleet")
        print(f"Serving at http://{host}:{port}/v1", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()


def start_ray(cpus: int) -> None:
    """A Ray of its own on this machine, whose processes find what this one finds."""
    environment = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    ray.init(
        address="local",
        num_cpus=cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        runtime_env={"env_vars": environment},
    )


def _as_ctrl_c(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
