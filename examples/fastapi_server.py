"""A web server of your own around `AsyncLLM`, with FastAPI: generate, load, unload, list.

`minivllm serve` is the whole server, with OpenAI's routes, keys, limits and metrics. This is for an API of your own:

    pip install fastapi uvicorn
    uvicorn --factory examples.fastapi_server:make_app
    curl localhost:8000/generate -H 'content-type: application/json' \\
         -d '{"prompt": "How many employees live in Oslo?", "lora_name": "sql", "lora_path": "adapters/sql"}'
"""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from examples.common import ADAPTERS
from minivllm import AsyncLLM, EngineArgs, LoRARequest, SamplingParams
from minivllm.models.demo_model import demo_model_path


class Load(BaseModel):
    """An adapter: its name, and its folder below the one that the server reads from."""

    lora_name: str
    lora_path: str


class Generate(BaseModel):
    """A question; with an adapter, which is loaded if `lora_path` says where it is."""

    prompt: str
    max_tokens: int = 48
    temperature: float = 0.0
    lora_name: str | None = None
    lora_path: str | None = None


class Adapters:
    """Name -> the request that loaded it. A client gives names and folders; ids are the server's.

    root   folder that every path has to be in: a client must not read the server's other files
    """

    def __init__(self, llm: AsyncLLM, root: Path) -> None:
        self.llm, self.root = llm, root.resolve()
        self.loaded: dict[str, LoRARequest] = {}
        self._ids = itertools.count(1)

    async def load(self, name: str, path: str) -> LoRARequest:
        if name not in self.loaded:
            folder = (self.root / path).resolve()
            if not folder.is_relative_to(self.root):
                raise HTTPException(403, f"'{path}' is not in the folder of adapters")
            request = LoRARequest(name, next(self._ids), str(folder))
            try:
                await self.llm.add_lora(request)
            except (FileNotFoundError, ValueError) as error:
                raise HTTPException(
                    404 if isinstance(error, FileNotFoundError) else 400, str(error)
                ) from error
            self.loaded[name] = request
        return self.loaded[name]

    def named(self, name: str) -> LoRARequest:
        if name not in self.loaded:
            raise HTTPException(404, f"adapter '{name}' is not loaded; there are {sorted(self.loaded)}")
        return self.loaded[name]


def make_app(llm: AsyncLLM | None = None, root: Path = ADAPTERS) -> FastAPI:
    """The application.   llm: the engine, None = the demo model's, which ends with the server"""
    args = EngineArgs(demo_model_path(), enable_lora=True, max_loras=2, max_cpu_loras=8, max_lora_rank=32)
    engine = llm or AsyncLLM.from_engine_args(args, max_queued=64)
    adapters = Adapters(engine, root)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.drain(seconds=10)
        engine.shutdown()

    app = FastAPI(title="adapters", lifespan=lifespan)

    @app.post("/generate")
    async def generate(asked: Generate) -> dict[str, str | None]:
        lora_request = None
        if asked.lora_name is not None:
            name, path = asked.lora_name, asked.lora_path
            lora_request = adapters.named(name) if path is None else await adapters.load(name, path)
        prompt = await engine.chat_prompt([{"role": "user", "content": asked.prompt}], lora_request)
        try:
            params = SamplingParams(temperature=asked.temperature, max_tokens=asked.max_tokens)
            async for output in engine.generate(
                prompt, params, uuid4().hex, lora_request, output_kind="final"
            ):
                last = output  # the only one, of the whole answer
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        if last.error is not None:
            raise HTTPException(500, last.error)
        return {"text": last.outputs[0].text, "adapter": asked.lora_name}

    @app.post("/adapters")
    async def load(asked: Load) -> dict[str, int]:
        return {"lora_int_id": (await adapters.load(asked.lora_name, asked.lora_path)).lora_int_id}

    @app.delete("/adapters/{name}")
    async def unload(name: str) -> dict[str, bool]:
        request = adapters.named(name)
        del adapters.loaded[name]
        return {"removed": await engine.remove_lora(request.lora_int_id)}

    @app.get("/adapters")
    async def list_adapters() -> dict[str, list[str]]:
        in_memory = await engine.list_loras()
        return {
            "loaded": sorted(adapters.loaded),
            "in_memory": sorted(n for n, r in adapters.loaded.items() if r.lora_int_id in in_memory),
        }

    return app
