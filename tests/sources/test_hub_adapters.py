"""Adapters by their Hugging Face id, with the hub's own client: its cache, no network, and a hub of our own.

The hub is a local web server that speaks what `snapshot_download` asks for; nothing leaves this machine.
"""

import hashlib
import http.server
import json
import logging
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import load_file

from minivllm import LLM, LoRARequest
from minivllm.vllm.utils import get_adapter_absolute_path
from tests.worlds.engines import OPTIONS, greedy, run, tokens_of

ID = "somebody/sql-adapter"
PROMPT = [5, 6, 7, 8, 9]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, and a folder to work in that holds nothing."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "hub"


@pytest.fixture
def connections(monkeypatch):
    """Every address that anybody tries to reach; none can be."""
    tried = []

    def refuse(host, *args, **kwargs):
        tried.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.fixture
def offline(monkeypatch, connections):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return connections


def put_into_cache(cache: Path, adapter: Path) -> Path:
    """A copy as the hub's client keeps it: files as links to blobs, and `main` leading to the commit."""
    repository = cache / f"models--{ID.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in adapter.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def answer(world, path=ID, count=6):
    """The tokens of an engine whose request names the adapter by that path."""
    engine = world.engine()
    engine.add_request("a", PROMPT, greedy(count), lora_request=LoRARequest("sql", 7, str(path)))
    return tokens_of(run(engine)["a"])


class TestCopy:
    def test_in_the_cache_is_found_without_any_connection(self, world, cache, offline):
        snapshot = put_into_cache(cache, world.path("qv"))

        assert get_adapter_absolute_path(ID) == str(snapshot)
        assert offline == []

    def test_in_the_cache_is_found_when_the_hub_is_not(self, world, cache, connections):
        snapshot = put_into_cache(cache, world.path("qv"))

        assert get_adapter_absolute_path(ID) == str(snapshot)
        assert connections, "it should have looked for a newer one"

    def test_that_lacks_nothing_but_a_tokenizer_will_do(self, world, cache, offline):
        """Such as vLLM leaves behind, which fetches `adapter_*`; the client knows of the files that are missing."""
        snapshot = put_into_cache(cache, world.path("qv"))
        write_listing(snapshot, "adapter_config.json", WEIGHTS, "tokenizer.json", "model.safetensors")

        assert get_adapter_absolute_path(ID) == str(snapshot)

    @pytest.mark.parametrize("missing", [WEIGHTS, "new_embeddings.safetensors"])
    def test_that_lacks_weights_will_not(self, world, cache, offline, caplog, missing):
        snapshot = put_into_cache(cache, world.path("qv"))
        (snapshot / WEIGHTS).unlink()
        write_listing(snapshot, "adapter_config.json", missing)

        with caplog.at_level(logging.WARNING):
            assert get_adapter_absolute_path(ID) == ID
        assert "did not give it" in caplog.text

    def test_that_is_not_there_is_known_at_once_offline_and_the_reason_told(
        self, offline, caplog, monkeypatch
    ):
        """At once: without a connection, and without a pause before another try."""
        pauses = []
        monkeypatch.setattr(time, "sleep", pauses.append)

        with caplog.at_level(logging.WARNING):
            found = get_adapter_absolute_path(ID)

        assert found == ID
        assert "HF_HUB_OFFLINE" in caplog.text
        assert offline == pauses == []

    def test_that_is_not_there_refuses_the_request_alone(self, world, offline):
        engine = world.engine()
        engine.add_request("base", PROMPT, greedy(4))

        reason = "the Hugging Face hub did not give it: .*HF_HUB_OFFLINE"
        with pytest.raises(
            FileNotFoundError, match=f"adapter 'sql': adapter folder '{ID}' does not exist, and {reason}"
        ):
            engine.add_request("a", PROMPT, greedy(4), lora_request=LoRARequest("sql", 7, ID))

        assert tokens_of(run(engine)["base"]) == world.oracle().greedy(None, PROMPT, 4)


def write_listing(snapshot: Path, *names: str) -> None:
    """The client's note of what is in the repository, which it makes when it downloads."""
    from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

    entry = TreeCacheEntry(size=9, blob_id=COMMIT, lfs_sha256=None, lfs_size=None, xet_hash=None)
    write_tree_cache(str(snapshot.parents[1]), COMMIT, dict.fromkeys(names, entry))


class Hub(http.server.ThreadingHTTPServer):
    """One repository, as the hub answers for it.

    files    name -> bytes
    broken   names of files that cannot be had
    asked    the paths of all requests
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.broken: set[str] = set()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def commit(self) -> str:
        content = b"".join(name.encode() + data for name, data in sorted(self.files.items()))
        return hashlib.sha1(content).hexdigest()

    @property
    def fetched(self) -> set[str]:
        """Names of the files that were asked for."""
        return {path.partition(f"/resolve/{self.commit}/")[2] for path in self.asked if "/resolve/" in path}


class HubHandler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: Hub = self.server
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(path)
        resolve = f"/{ID}/resolve/{hub.commit}/"
        if path in (f"/api/models/{ID}", f"/api/models/{ID}/revision/main"):
            siblings = [{"rfilename": name} for name in hub.files]
            self.answer(json.dumps({"id": ID, "sha": hub.commit, "siblings": siblings}).encode())
        elif path == f"/api/models/{ID}/tree/{hub.commit}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif path.startswith(resolve) and (name := path.removeprefix(resolve)) in hub.files:
            data = hub.files[name]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": hub.commit}
            self.answer(data, headers, 403 if name in hub.broken else 200)
        else:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    def answer(self, data: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


BESIDE_IT = {
    "README.md": b"# An adapter",
    "model.safetensors": b"the whole base model",
    "optimizer.pt": b"what the trainer had in mind",
    "checkpoint-100/adapter_model.safetensors": b"older",
    ".gitattributes": b"",
}
WITH_IT = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b"{}",
    "chat_template.jinja": b"",
    "new_embeddings.safetensors": b"rows",
}


def adapter_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("adapter_config.json", WEIGHTS)}


@pytest.fixture
def hub(world, monkeypatch):
    """Has adapter 'qv', and what people put beside their adapters."""
    server = Hub({**adapter_files(world.path("qv")), **BESIDE_IT})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class TestRefusal:
    def test_names_the_error_of_a_hub_that_cannot_be_reached(self, world, connections):
        with pytest.raises(FileNotFoundError, match=f"'{ID}' does not exist.*did not give it: .*not known"):
            world.engine().add_lora(LoRARequest("sql", 7, ID))
        assert connections

    def test_names_what_the_hub_answered(self, world, hub):
        with pytest.raises(FileNotFoundError, match=r"'nobody/nothing' does not exist.*404") as refusal:
            answer(world, "nobody/nothing")

        assert len(str(refusal.value)) <= 500


BESIDE_A_MODEL = {
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"other weights",
    "consolidated.safetensors": b"the same weights",
    "pytorch_model.bin": b"likewise",
    "README.md": b"# A model",
}


class TestBaseModel:
    def test_by_its_id_is_fetched_once_and_served_like_its_folder(self, world, hub, monkeypatch):
        files = {path.name: path.read_bytes() for path in world.base.iterdir()}
        hub.files = {**files, **BESIDE_A_MODEL}
        llm = LLM(ID, **{**OPTIONS, "enable_lora": True})
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        again = LLM(ID, **{**OPTIONS, "enable_lora": True})

        prompt, lora = {"prompt_token_ids": PROMPT}, world.request("qv")
        answers = [
            each.generate(prompt, greedy(6), use_tqdm=False, lora_request=lora) for each in (llm, again)
        ]

        assert hub.fetched == set(files)
        assert [answer[0].outputs[0].token_ids for answer in answers] == [
            world.oracle().greedy("qv", PROMPT, 6)
        ] * 2

    def test_that_cannot_be_had_offline_is_a_sentence_with_the_way_out(self, offline):
        with pytest.raises(FileNotFoundError) as refusal:
            LLM(ID)

        assert f"no model folder '{ID}'" in str(refusal.value)
        assert f"`hf download {ID} --local-dir FOLDER`" in str(refusal.value)
        assert "HF_HUB_OFFLINE" in str(refusal.value)
        assert "\n" not in str(refusal.value) and len(str(refusal.value)) <= 500


class TestDownload:
    def test_brings_what_is_the_adapters_and_nothing_else(self, world, hub, cache):
        hub.files |= WITH_IT

        folder = Path(get_adapter_absolute_path(ID))

        assert folder.is_relative_to(cache) and folder.name == hub.commit
        assert {path.name for path in folder.iterdir()} == {"adapter_config.json", WEIGHTS, *WITH_IT}
        assert hub.fetched == {path.name for path in folder.iterdir()}
        for path in folder.iterdir():
            assert path.read_bytes() == hub.files[path.name]

    def test_happens_once_and_is_not_asked_for_again(self, world, hub, monkeypatch):
        first = get_adapter_absolute_path(ID)
        hub.asked.clear()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

        assert get_adapter_absolute_path(ID) == first
        assert answer(world) == world.oracle().greedy("qv", PROMPT, 6)
        assert hub.asked == []

    def test_of_a_new_commit_is_another_folder(self, world, hub):
        old = get_adapter_absolute_path(ID)
        hub.files |= adapter_files(world.path("all"))

        new = get_adapter_absolute_path(ID)

        assert new != old
        assert answer(world) == world.oracle().greedy("all", PROMPT, 6)
        assert answer(world, old) == world.oracle().greedy("qv", PROMPT, 6)

    def test_of_a_new_commit_reaches_a_running_engine_only_by_a_reload(self, world, hub):
        """Evicted from memory by another adapter, and read again: from the folder it had, with no word to the hub."""
        engine = world.engine(max_loras=1, max_cpu_loras=1)
        mine, other = LoRARequest("mine", 7, ID), world.request("mlp")

        def ask(name, lora):
            engine.add_request(name, PROMPT, greedy(6), lora_request=lora)
            return tokens_of(run(engine)[name])

        first = ask("first", mine)
        hub.files |= adapter_files(world.path("all"))
        ask("between", other)
        hub.asked.clear()
        second, asked = ask("second", mine), list(hub.asked)
        third = ask("third", LoRARequest("mine", 7, ID, load_inplace=True))
        ask("again between", other)
        fourth = ask("fourth", mine)

        old, new = (world.oracle().greedy(name, PROMPT, 6) for name in ("qv", "all"))
        assert (first, second, third, fourth) == (old, old, new, new)
        assert asked == []

    def test_for_a_reload_that_waits_brings_the_commit_of_when_it_was_ordered(self, world, hub):
        """No step waits for the hub, or gets what came there later."""
        engine = world.engine(max_loras=2)
        engine.add_request("old", PROMPT, greedy(6), lora_request=LoRARequest("mine", 7, ID))
        engine.step()
        hub.files |= adapter_files(world.path("all"))
        engine.add_request(
            "new", PROMPT, greedy(6), lora_request=LoRARequest("mine", 7, ID, load_inplace=True)
        )
        hub.files |= adapter_files(world.path("mlp"))
        hub.asked.clear()

        outputs = run(engine)

        assert hub.asked == []
        assert tokens_of(outputs["old"]) == world.oracle().greedy("qv", PROMPT, 6)
        assert tokens_of(outputs["new"]) == world.oracle().greedy("all", PROMPT, 6)

    @pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
    def test_that_breaks_off_gives_the_id_back_with_the_reason(self, hub, caplog, name):
        hub.broken.add(name)

        with caplog.at_level(logging.WARNING):
            assert get_adapter_absolute_path(ID) == ID

        assert "403" in caplog.text

    def test_without_the_tokenizer_will_do(self, world, hub):
        hub.files |= WITH_IT
        del hub.files["new_embeddings.safetensors"]
        hub.broken.add("tokenizer.json")

        assert answer(world) == world.oracle().greedy("qv", PROMPT, 6)

    def test_may_be_a_pickle_of_tensors(self, world, hub, tmp_path):
        torch.save(load_file(world.path("qv") / WEIGHTS), tmp_path / "adapter_model.bin")
        hub.files["adapter_model.bin"] = (tmp_path / "adapter_model.bin").read_bytes()
        del hub.files[WEIGHTS]

        assert answer(world) == world.oracle().greedy("qv", PROMPT, 6)

    def test_is_not_needed_where_a_folder_has_the_ids_name(self, world, hub):
        shutil.copytree(world.path("qv"), ID)

        assert answer(world) == world.oracle().greedy("qv", PROMPT, 6)
        assert hub.asked == []


# What huggingface_hub was seen to raise. Made from its module when a test runs: its import takes a while.
HUB_ERRORS = {
    "no such repository": lambda e: e.HfHubHTTPError(
        "404", response=SimpleNamespace(headers={}, request=None)
    ),
    "no network, no copy": lambda e: e.LocalEntryNotFoundError("no copy"),
    "offline": lambda e: e.OfflineModeIsEnabled("offline"),
    "not a hub id": lambda e: e.HFValidationError("not an id"),
    "a proxy that refuses, a connection cut": lambda e: e.HTTPError("403 Forbidden"),
    "the page of a captive portal": lambda e: json.JSONDecodeError("Expecting value", "<html>", 0),
    "disk full": lambda e: OSError(28, "No space left on device"),
}


class TestAPath:
    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/not/there", "/not/there"),
            ("~/adapters/sql", "{cwd}/home/adapters/sql"),
            ("adapters/sql", "{cwd}/adapters/sql"),
            ("./adapters/sql", "{cwd}/adapters/sql"),
        ],
    )
    def test_of_a_folder_is_made_absolute(self, path, expected, tmp_path, connections, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        (tmp_path / "adapters" / "sql").mkdir(parents=True)

        assert get_adapter_absolute_path(path) == expected.format(cwd=tmp_path)
        assert connections == []

    @pytest.mark.parametrize(
        "path", ["sql", "./sql", "../sql", "a/b/c", "adapters/typo", "somebody/", "", "a\0b"]
    )
    def test_that_is_no_hub_id_is_not_asked_of_the_network(self, path, connections):
        """A path misspelt must fail at once, also where a firewall swallows what is sent."""
        os.mkdir("adapters")

        assert get_adapter_absolute_path(path) == path
        assert connections == []

    @pytest.mark.parametrize("kind", HUB_ERRORS)
    def test_that_the_hub_does_not_give_comes_back_with_the_reason_logged(self, kind, monkeypatch, caplog):
        def snapshot_download(**options):
            raise error

        error = HUB_ERRORS[kind](errors)
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)

        with caplog.at_level(logging.WARNING):
            found = get_adapter_absolute_path(ID)

        assert found == ID
        assert ID in caplog.text
        assert str(error) in caplog.text
