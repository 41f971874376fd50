"""What a fleet is started with: by `python -m deploy.fleet`, by `serve run`, or by a manifest's `args`."""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from minivllm.commands.common import resolve_model
from minivllm.commands.serve import adapters_of, api_keys, model_name
from minivllm.config import SLOTS
from minivllm.engine_args import EngineArgs
from minivllm.policies.routing import POLICIES
from minivllm.server.settings import ServerSettings


class FleetArgs(BaseModel):
    """Plain values, so that YAML can say them. ValueError for one that nobody knows.

    model, served_model_name    None = the demo model, and what `model` says
    lora_modules                `NAME=PATH` each, or `demo` alone
    lora_root, allow_runtime_lora   as `ServerSettings` says
    api_keys                    likewise; none = that of MINIVLLM_API_KEY where the server is, if it has one
    base_model_name             what adapters below `lora_root` call the model, where its folder is called otherwise
    engine                      further `EngineArgs`
    max_queued                  requests of one engine beside those that run; more of them go to another one, or wait
    min_replicas, max_replicas  engines; as many as `target_ongoing_requests` of each need
    num_cpus, num_gpus          that Ray reserves for one engine
    routing                     which engine gets a request: a policy of minivllm.policies.routing, or "ray",
                                Serve's own for multiplexed models
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    served_model_name: str | None = None
    lora_modules: list[str] = []
    lora_root: str | None = None
    base_model_name: str | None = None
    allow_runtime_lora: bool = False
    api_keys: list[str] = Field(default=[], repr=False)
    engine: dict[str, Any] = {}
    max_queued: int = Field(default=16, ge=0)
    min_replicas: int = Field(default=2, ge=1)
    max_replicas: int = Field(default=2, ge=1)
    target_ongoing_requests: float = Field(default=8.0, gt=0)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    routing: Literal["ray", *POLICIES] = "affine"

    @model_validator(mode="after")
    def _check(self) -> "FleetArgs":
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is less than min_replicas {self.min_replicas}"
            )
        if self.engine.get("lora_extra_vocab_size"):
            raise ValueError(
                "a fleet serves no adapters with tokens of their own; leave lora_extra_vocab_size out"
            )
        self.engine_args("")  # TypeError for options that engines do not have
        return self

    def engine_args(self, model: str) -> EngineArgs:
        """Of one engine.   model: a folder"""
        options = {"max_loras": SLOTS, "max_lora_rank": 64, **self.engine}  # as `minivllm serve`
        return EngineArgs(model=model, enable_lora=True, **options)

    def found_engine_args(self) -> EngineArgs:
        """The same for the model that is meant, where this runs; the demo model is made there if need be."""
        return self.engine_args(resolve_model(self.model))

    @property
    def slots(self) -> int:
        """Of each engine."""
        return self.engine_args("").max_loras

    @property
    def adapters_in_memory(self) -> int:
        """Of each engine."""
        return self.engine_args("").max_cpu_loras or self.slots

    def check_cpus(self, cpus: float) -> None:
        """ValueError where so many are too few for the engines at the start: Ray would wait for more."""
        if (needed := self.num_cpus * self.min_replicas) > cpus:
            raise ValueError(
                f"{self.min_replicas} engines of num_cpus {self.num_cpus:g} need {needed:g} CPUs, "
                f"and Ray has {cpus:g}; pass --cpus {math.ceil(needed)}"
            )

    @property
    def max_ongoing_requests(self) -> int:
        """That one engine takes; it answers so many at the same time, or has them wait."""
        return self.engine_args("").max_num_seqs + self.max_queued

    def server_settings(self) -> ServerSettings:
        """Of the server in front of the engines. Errors as there."""
        return ServerSettings(
            model_name=self.served_model_name or model_name(self.model),
            adapters=tuple(adapters_of(self.lora_modules, self.model)),
            lora_root=self.lora_root,
            allow_runtime_lora=self.allow_runtime_lora,
            api_keys=tuple(api_keys(self.api_keys)),
        )
