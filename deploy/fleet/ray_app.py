"""The fleet as an application of Ray Serve: `serve run deploy.fleet.ray_app:build`."""

from collections.abc import AsyncGenerator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from deploy.fleet.arguments import FleetArgs
from deploy.fleet.fleet_llm import FleetLLM
from deploy.fleet.replica import Replica
from deploy.fleet.router import PolicyRouter
from minivllm.commands.adapter_folder import register_folder
from minivllm.errors import EngineDeadError
from minivllm.server.app import FLEET_ROUTES, build_app
from minivllm.serving.async_llm import AsyncLLM, QueueFull

ENGINE, SERVER = "engine", "server"
# An engine that has ended fails three checks, and is then replaced.
SECONDS_BETWEEN_CHECKS = 1
SECONDS_TO_DRAIN = 30

HEAD = "node:__internal_head__"  # a resource that Ray gives its head: engines' nodes come and go, and the server stays

LOST = (RayError, RayServeException)  # a request that has lost its engine, or found none


def build(args: FleetArgs) -> Application:
    """The application, as a configuration of Ray Serve names it: such a function takes one parameter."""
    return application(args)


def application(args: FleetArgs, more_calls: Collection[Callable[..., Any]] = ()) -> Application:
    """One OpenAI server in front of engines, each a replica of its own.   more_calls: as of `AsyncLLM`"""
    settings = args.server_settings()  # what contradicts itself is said before anything starts
    engines = serve.deployment(engine_class(args.slots)).options(
        name=ENGINE,
        max_ongoing_requests=args.max_ongoing_requests,
        autoscaling_config={
            "min_replicas": args.min_replicas,
            "max_replicas": args.max_replicas,
            "target_ongoing_requests": args.target_ongoing_requests,
        },
        request_router_config=router_of(args),
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.num_gpus},
        health_check_period_s=SECONDS_BETWEEN_CHECKS,
        logging_config={"enable_access_log": False},
        graceful_shutdown_timeout_s=SECONDS_TO_DRAIN,
    )

    def app() -> Starlette:
        return server_app(args)

    # One: it has the names that stand, and their versions.
    server = serve.deployment(serve.ingress(app)()).options(
        name=SERVER,
        num_replicas=1,
        max_ongoing_requests=2 * settings.max_concurrency,  # beyond its own limit it says why it refuses
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        graceful_shutdown_timeout_s=SECONDS_TO_DRAIN,
    )
    return server.bind(engines.bind(args, more_calls))


def router_of(args: FleetArgs) -> RequestRouterConfig:
    if args.routing == "ray":
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class=PolicyRouter,
        request_router_kwargs={"policy": args.routing, "room": args.adapters_in_memory},
    )


def engine_class(slots: int) -> type[Replica]:
    """What Ray Serve makes replicas of.   slots: of each; so many adapters Serve takes to be there"""

    class Engine(Replica):
        def __init__(self, args: FleetArgs, more_calls: Collection[Callable[..., Any]]) -> None:
            super().__init__(AsyncLLM.from_engine_args(args.found_engine_args(), more_calls=more_calls))

        async def generate(self, *args: Any) -> AsyncGenerator[Any, None]:
            if name := serve.get_multiplexed_model_id():
                await self.hold(name)
            async with aclosing(super().generate(*args)) as items:
                async for item in items:
                    yield item

        @serve.multiplexed(max_num_models_per_replica=slots)
        async def hold(self, name: str) -> str:
            """Serve counts who uses which adapter, and sends others for it here; the engine reads it by itself."""
            return name

        def __del__(self) -> None:
            self.llm.shutdown()

    return Engine


class RayEngines:
    """`Engines` behind a handle. A request names its adapter as Serve's multiplexed model, and is routed by it."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.handle = handle

    async def generate(self, adapter: str | None, *args: Any) -> AsyncGenerator[Any, None]:
        handle = self.handle.options(stream=True, multiplexed_model_id=adapter or "")
        response = handle.generate.remote(*args)
        try:
            async for item in response:
                yield item
        except LOST as error:
            raise as_ours(error) from error
        finally:
            response.cancel()

    async def one(self, method: str, *args: Any) -> Any:
        try:
            result = await self.handle.ask.remote(method, *args)
        except LOST as error:
            raise as_ours(error) from error
        if isinstance(result, Exception):
            raise result
        return result

    async def all(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self.handle.broadcast("ask", method, *args).results_async(return_exceptions=True)
        except RayServeException:  # there is none
            return []


def as_ours(error: Exception) -> Exception:
    """What a server has a status for. What a replica raised stays as it is: it is a fault of ours."""
    if isinstance(error, RayTaskError):
        return error
    if isinstance(error, BackPressureError):
        return QueueFull("all engines have as many requests as they take; ask again later")
    return EngineDeadError("the engine that had this request has ended; ask again")


def server_app(args: FleetArgs) -> Starlette:
    """In the replica of the server: the application, as soon as an engine is there."""
    settings = args.server_settings()
    register_folder(settings.lora_root, args.base_model_name, args.model)
    handle = serve.get_deployment_handle(ENGINE)
    with ThreadPoolExecutor(1) as thread:  # the event loop is this thread's, and may not wait
        config, tokenizer = thread.submit(lambda: handle.ask.remote("start").result()).result()
    return build_app(FleetLLM(RayEngines(handle), config, tokenizer), settings, FLEET_ROUTES)
