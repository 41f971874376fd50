"""Versions over HTTP, and in engines in a process or a thread of their own."""

import asyncio
import re
import threading

import httpx
import pytest
from learning_world import learning_world, ours

from minivllm import AsyncLLM, LLMEngine
from minivllm.lora.request import AtLeast
from minivllm.serving.calls import describe_adapters
from tests.worlds.engines import greedy
from tests.worlds.servers import serving
from tests.worlds.waiting import PATIENCE, wait_until

PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return learning_world(tmp_path_factory)


def logprobs(world, folder, output):
    text = PROMPT + output.outputs[0].token_ids
    own = world.oracle().logits(folder, [text])[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return own[range(len(own)), output.outputs[0].token_ids]


class TestOverHTTP:
    @pytest.fixture
    def http(self, world):
        options = {"lora_root": str(world.folder), "allow_runtime_lora": True}
        with (
            serving(world, "policy", "all", **options) as server,
            httpx.Client(base_url=server.url, timeout=PATIENCE) as http,
        ):
            http.engine = server.server.state.llm._client.engine
            yield http

    def load(self, world, http, folder, **more):
        body = {"lora_name": "policy", "lora_path": str(world.path(folder)), "load_inplace": True, **more}
        return http.post("/v1/load_lora_adapter", json=body)

    def complete(self, http, model="policy", **more):
        body = {
            "model": model,
            "prompt": PROMPT,
            "temperature": 0,
            "max_tokens": 6,
            "ignore_eos": True,
            **more,
        }
        return http.post("/v1/completions", json=body)

    def test_a_response_says_the_version_in_a_header_and_in_its_body(self, world, http):
        first = self.complete(http, return_token_ids=True)
        update = self.load(world, http, "again", running="finish")
        second = self.complete(http, return_token_ids=True)

        assert (first.headers["x-lora-version"], first.json()["lora_version"]) == ("0", 0)
        assert update.text == "Success: LoRA adapter 'policy' updated successfully."
        assert update.headers["x-lora-version"] == "1"
        assert (second.headers["x-lora-version"], second.json()["lora_version"]) == ("1", 1)
        tokens = second.json()["choices"][0]["token_ids"]
        assert tokens == world.oracle().greedy("again", PROMPT, 6)
        assert first.json()["choices"][0]["token_ids"] == world.oracle().greedy("policy", PROMPT, 6)
        base = self.complete(http, "tiny")
        assert "x-lora-version" not in base.headers and "lora_version" not in base.json()
        assert self.complete(http, "all").headers["x-lora-version"] == "0"

    def test_a_stream_says_it_too(self, world, http):
        self.load(world, http, "again", lora_version=12)

        response = self.complete(http, stream=True)

        assert response.headers["x-lora-version"] == "12"
        assert '"lora_version":12' in response.text.replace(" ", "")

    def test_a_chat_does_too(self, world, http):
        body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}

        assert http.post("/v1/chat/completions", json=body).json()["lora_version"] == 0

    def test_a_request_waits_for_its_version(self, world, http):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.complete(http, min_lora_version=1)))
        thread.start()
        wait_until(lambda: len(http.engine.scheduler.waiting) == 1)
        self.load(world, http, "again", running="restart")
        thread.join(PATIENCE)

        assert found[0].headers["x-lora-version"] == "1"

    def test_in_vain_is_503_by_name(self, world, http):
        response = self.complete(http, min_lora_version=9, lora_version_timeout=0)

        assert response.status_code == 503
        assert "version 9 of adapter 'policy' did not come within 0 s" in response.json()["error"]["message"]

    def test_a_plain_load_in_place_counts(self, world, http):
        self.complete(http)
        assert self.load(world, http, "again").status_code == 200
        assert self.complete(http).headers["x-lora-version"] == "1"

    def test_metrics_and_listings_keep_to_the_name(self, world, http):
        self.complete(http)
        self.load(world, http, "again", running="finish")
        self.complete(http)

        rows = {each["name"]: each for each in http.get("/v1/adapters").json()["data"]}
        assert rows.keys() == {"policy", "all"}
        assert rows["policy"]["state"] == "in a slot" and rows["policy"]["path"].endswith("again")
        loads = re.findall(r'\{[^}]*"policy"[^}]*\} 2\.0', http.get("/metrics").text)
        assert loads, "requests of both versions are counted under one name"
        unload = http.post("/v1/unload_lora_adapter", json={"lora_name": "policy"})
        assert unload.status_code == 200
        assert self.complete(http).status_code == 404

    @pytest.mark.parametrize(
        ("body", "status", "said"),
        [
            ({"load_inplace": False, "running": "finish"}, 400, "only with load_inplace: true"),
            ({"running": "drop"}, 400, "running"),
            ({"lora_version": 0}, 400, "lora_version"),
            ({"lora_path": "nowhere", "running": "finish"}, 404, "nowhere"),
            ({"lora_name": "nobody", "running": "finish"}, 404, "nobody"),
        ],
    )
    def test_updates_that_are_refused(self, world, http, body, status, said):
        response = self.load(world, http, "again", **body)

        assert response.status_code == status and said in response.json()["error"]["message"]

    def test_the_base_model_has_no_versions(self, http):
        response = self.complete(http, "tiny", min_lora_version=1)

        assert response.status_code == 400 and "has no versions" in response.json()["error"]["message"]


@pytest.mark.parametrize("in_a_process", [False, True])
def test_an_async_engine_is_updated_while_it_streams(world, in_a_process):
    async def check(llm):
        await llm.add_lora(world.request("policy"))
        begun, outputs = asyncio.Event(), []

        async def stream():
            params = greedy(12, logprobs=0)
            async for output in llm.generate(
                {"prompt_token_ids": PROMPT}, params, "old", "policy", output_kind="final"
            ):
                outputs.append(output)

        async def wait():
            params, asked = greedy(6, logprobs=0), AtLeast("policy", 1)
            begun.set()
            prompt = {"prompt_token_ids": PROMPT}
            return [o async for o in llm.generate(prompt, params, "new", asked, output_kind="final")][-1]

        tasks = asyncio.create_task(stream()), asyncio.create_task(wait())
        await begun.wait()
        version = await llm.update_lora("policy", world.tensors("again"), peft_config=world.config("again"))
        new = (await asyncio.gather(*tasks))[1]
        assert version == new.lora_version == 1
        assert (ours(new) - logprobs(world, "again", new)).abs().max() < 1e-9
        old = outputs[-1]
        assert (ours(old) - logprobs(world, ["policy", "again"][old.lora_version], old)).abs().max() < 1e-9
        assert not new.lora_request.lora_tensors or not in_a_process, "weights stay in the engine's process"
        given = world.request("policy").lora_int_id
        assert (await llm.call(describe_adapters))[given]["state"] == "in a slot"
        assert await llm.remove_lora(given)
        with pytest.raises(ValueError, match="unknown"):
            await llm.update_lora("policy", world.tensors("again"))

    llm = AsyncLLM(world.engine_process()) if in_a_process else AsyncLLM.from_engine(world.engine())
    try:
        asyncio.run(check(llm))
    finally:
        llm.shutdown()


def test_an_llm_is_updated_by_another_thread_while_it_generates(world):
    llm = world.llm()
    llm.generate(
        {"prompt_token_ids": PROMPT}, greedy(1), lora_request=world.request("policy"), use_tqdm=False
    )
    found = []
    asked = {"lora_request": AtLeast("policy", 1), "use_tqdm": False}
    thread = threading.Thread(
        target=lambda: found.extend(
            llm.generate({"prompt_token_ids": PROMPT}, greedy(4, logprobs=0), **asked)
        )
    )
    thread.start()
    assert llm.update_lora("policy", world.tensors("again")) == 1
    thread.join(PATIENCE)

    assert found[0].lora_version == 1
    assert (ours(found[0]) - logprobs(world, "again", found[0])).abs().max() < 1e-9


def test_ranks_refuse_an_update_by_name(world):
    engine: LLMEngine = world.engine()
    engine.add_lora(world.request("policy"))
    engine.adapters._tensor_parallel_size = 2

    with pytest.raises(
        ValueError, match="update_lora is served by one process, but tensor_parallel_size is 2"
    ):
        world.update(engine, "again")
