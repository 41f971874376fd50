"""Adapters by name alone: a folder of them, resolvers in their order, and requests that name what they find."""

import asyncio
import logging
import shutil

import pytest

from minivllm import LoRARequest
from minivllm.sources.resolver import FilesystemResolver, LoRAResolver, LoRAResolverRegistry, stable_id
from tests.worlds.engines import greedy, run, snapshot, tokens_of
from tests.worlds.spoiled_adapters import edit_config

PROMPT = [5, 6, 7, 8, 9]
PROMPT_DICT = {"prompt_token_ids": PROMPT}
IDS = [5676722674446411608, 4809025674739654711, 5889646737696843852, 5883532597330796468]


@pytest.fixture(autouse=True)
def no_resolvers(monkeypatch):
    """The registry is the process's: every test has one of its own."""
    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {})


@pytest.fixture
def folder(world, tmp_path):
    """A folder of adapters; beside it one that is not in it."""
    folder = tmp_path / "adapters"
    shutil.copytree(world.path("qv"), folder / "sql")
    shutil.copytree(world.path("all"), folder / "team" / "sql")
    shutil.copytree(world.path("mlp"), tmp_path / "outside")
    return folder


def find(resolver, name, base_model_name):
    return asyncio.run(resolver.resolve_lora(str(base_model_name), name))


class Answers(LoRAResolver):
    """Answers from a dict, or raises what it finds there; remembers what it was asked."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    async def resolve_lora(self, base_model_name, lora_name):
        self.asked.append((base_model_name, lora_name))
        await asyncio.sleep(0)
        answer = self.answers.get(lora_name)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def register(**answers_of):
    """A resolver for each argument, in their order."""
    resolvers = [Answers(answers) for answers in answers_of.values()]
    for name, resolver in zip(answers_of, resolvers):
        LoRAResolverRegistry.register_resolver(name, resolver)
    return resolvers


class TestRegistry:
    def test_keeps_resolvers_in_their_order(self):
        second, first = register(b={}, a={})

        assert list(LoRAResolverRegistry.get_supported_resolvers()) == ["b", "a"]
        assert LoRAResolverRegistry.get_resolver("b") is second
        assert LoRAResolverRegistry.get_resolver("a") is first

    def test_warns_when_a_name_is_given_again_and_keeps_its_place(self, caplog):
        register(a={}, b={})

        with caplog.at_level(logging.WARNING):
            [new] = register(a={})

        assert "'a' was registered before" in caplog.text
        assert list(LoRAResolverRegistry.get_supported_resolvers()) == ["a", "b"]
        assert LoRAResolverRegistry.get_resolver("a") is new

    def test_names_those_there_are_when_asked_for_another(self):
        register(a={}, b={})

        with pytest.raises(KeyError, match="'c' not found; registered: a, b"):
            LoRAResolverRegistry.get_resolver("c")


class TestFolder:
    @pytest.mark.parametrize("name", ["sql", "team/sql"])
    def test_gives_the_adapter_under_its_folders_name(self, world, folder, name):
        found = find(FilesystemResolver(folder), name, world.base)

        assert found == LoRARequest(name, found.lora_int_id, str(folder / name))

    def test_gives_ids_that_are_the_same_in_every_process_and_none_that_people_count(self):
        """The numbers are those of another process."""
        ids = [stable_id(name) for name in ("sql", "json", "sql ", "\ud800")]

        assert ids == IDS
        assert all(2**62 <= adapter_id < 2**63 for adapter_id in ids)

    @pytest.mark.parametrize(
        "name",
        [
            "../outside",
            "team/../../outside",
            "{outside}",
            "{folder}/sql",
            "leads-out",
            "leads-out/sub",
            "loop",
            "..",
            ".",
            "",
            "/",
            "./sql",
            "sql/",
            "team//sql",
            "team/../sql",
            "../adapters/sql",
            "../../{above}/adapters/sql",
            "../" * 40 + "{from_top}/sql",
            "../adapters/team/sql",
            "..\\adapters\\sql",
            "back\\slash",
            "line\n",
            "sql\n",
            "sql\t",
            "//sql",
            "sql/.",
            "a\0b",
            "\ud800",
            "x" * 5000,
        ],
    )
    def test_is_not_left_by_any_name_nor_has_an_adapter_two_names(self, world, folder, name):
        outside = folder.parent / "outside"
        shutil.copytree(outside, outside / "sub")
        (folder / "leads-out").symlink_to(outside)
        (folder / "loop").symlink_to("loop")
        for odd in ("back\\slash", "line\n"):
            shutil.copytree(folder / "sql", folder / odd)

        above, from_top = folder.parent.name, str(folder)[1:]
        name = name.format(outside=outside, folder=folder, above=above, from_top=from_top)
        found = find(FilesystemResolver(folder), name, world.base)

        assert found is None

    def test_may_hold_links_that_stay_inside_and_be_a_link_itself(self, world, folder, tmp_path):
        (folder / "latest").symlink_to("sql")
        (tmp_path / "link").symlink_to(folder)

        found = find(FilesystemResolver(tmp_path / "link"), "latest", world.base)

        assert found.lora_path == str(folder / "sql"), "a link may lead elsewhere when the adapter is read"

    @pytest.mark.parametrize("name", ["team", "nobody", "file"])
    def test_answers_none_for_what_is_no_adapter(self, world, folder, name):
        (folder / "file").write_text("")

        assert find(FilesystemResolver(folder), name, world.base) is None

    def test_that_is_not_there_is_refused(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
            FilesystemResolver(tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("trained_on", "served"),
        [
            ("owner/model", "owner/model"),
            ("owner/model", "/data/model"),
            ("owner/model", "/data/model/"),
            ("owner/model", "/cache/models--owner--model/snapshots/0a1b2c"),
            ("{cwd}/base", "{cwd}/base"),
            ("{cwd}/base", "{cwd}/./link"),
            ("base", "{cwd}/base"),
            ("known as this", "/data/model"),
        ],
    )
    def test_gives_adapters_of_the_engines_model(self, folder, tmp_path, monkeypatch, trained_on, served):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "link").symlink_to("base")
        edit_config(folder / "sql", base_model_name_or_path=trained_on.format(cwd=tmp_path))

        found = find(FilesystemResolver(folder, ["known as this"]), "sql", served.format(cwd=tmp_path))

        assert found is not None

    @pytest.mark.parametrize(
        ("trained_on", "served"),
        [
            ("owner/model-2", "/data/model"),
            ("owner/model", "owner/model-2"),
            ("/home/somebody/final", "/srv/final"),
            ("somewhere/final", "/srv/final"),
            ("owner/model", "/cache/models--owner--other/snapshots/model"),
            (None, "/data/model"),
            (..., "/data/model"),
            ("", "/data/model"),
            (["owner/model"], "/data/model"),
        ],
    )
    def test_gives_no_adapter_of_another_model_and_says_so(
        self, folder, tmp_path, monkeypatch, caplog, trained_on, served
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "somewhere").mkdir()  # so `somewhere/final` is a path, not a hub id
        edit_config(folder / "sql", base_model_name_or_path=trained_on)

        with caplog.at_level(logging.WARNING):
            found = find(FilesystemResolver(folder), "sql", served)

        assert found is None
        assert f"the engine serves '{served}'" in caplog.text
        named = isinstance(trained_on, str) and trained_on != ""
        assert (f"pass --base-model-name {trained_on}" in caplog.text) == named

    def test_gives_no_adapter_of_another_kind_and_says_so(self, world, folder, caplog):
        edit_config(folder / "sql", peft_type="IA3")

        assert find(FilesystemResolver(folder), "sql", world.base) is None
        assert "'IA3'" in caplog.text

    @pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
    def test_leaves_a_config_that_cannot_be_read_to_be_refused_by_the_engine(self, world, folder, text):
        LoRAResolverRegistry.register_resolver("folder", FilesystemResolver(folder))
        (folder / "sql" / "adapter_config.json").write_text(text)

        with pytest.raises(ValueError, match=r"adapter 'sql': .*adapter_config.json' (is not|holds)"):
            world.engine().add_request("a", PROMPT, greedy(), lora_request="sql")


class TestRequests:
    @pytest.fixture
    def two(self, folder):
        """`sql` and `team/sql`, which are 'qv' and 'all' of the world."""
        LoRAResolverRegistry.register_resolver("folder", FilesystemResolver(folder))

    def test_that_name_an_adapter_in_a_folder_get_its_tokens(self, world, two):
        engine = world.engine()
        for name in ("sql", "team/sql"):
            engine.add_request(name, PROMPT, greedy(), lora_request=name)
        engine.add_request("base", PROMPT, greedy())

        outputs = run(engine)

        oracle = world.oracle()
        assert tokens_of(outputs["sql"]) == oracle.greedy("qv", PROMPT, 8)
        assert tokens_of(outputs["team/sql"]) == oracle.greedy("all", PROMPT, 8)
        assert tokens_of(outputs["base"]) == oracle.greedy(None, PROMPT, 8)
        assert outputs["sql"].lora_request.lora_name == "sql"

    def test_of_generate_may_mix_names_adapters_and_the_base(self, world, two):
        llm = world.llm()
        loras = ["sql", None, world.request("mlp"), "team/sql", "sql", "mlp"]

        answers = llm.generate([PROMPT_DICT] * 6, greedy(4), use_tqdm=False, lora_request=loras)

        expected = [
            world.oracle().greedy(name, PROMPT, 4) for name in ("qv", None, "mlp", "all", "qv", "mlp")
        ]
        assert [tokens_of(answer) for answer in answers] == expected

    def test_ask_once_for_a_name_however_many_they_are(self, world):
        [resolver] = register(a={"sql": world.request("qv")})
        llm = world.llm()

        for _ in range(2):
            llm.generate([PROMPT_DICT] * 3, greedy(2), use_tqdm=False, lora_request="sql")

        assert resolver.asked == [(str(world.base), "sql")]

    def test_ask_nobody_for_an_adapter_that_the_engine_knows(self, world):
        [resolver] = register(a={})
        engine = world.engine()
        engine.add_lora(world.request("qv"))
        engine.add_request("a", PROMPT, greedy(4), lora_request=world.request("qv", lora_name="alias"))

        for name in ("qv", "alias"):
            engine.add_request(name, PROMPT, greedy(4), lora_request=name)

        outputs = run(engine)
        expected = world.oracle().greedy("qv", PROMPT, 4)
        assert all(tokens_of(output) == expected for output in outputs.values())
        assert resolver.asked == []

    def test_ask_in_order_until_one_answers(self, world):
        first, second, third = register(
            a={}, b={"sql": world.request("mlp")}, c={"sql": world.request("all")}
        )
        engine = world.engine()

        engine.add_request("a", PROMPT, greedy(4), lora_request="sql")

        assert tokens_of(run(engine)["a"]) == world.oracle().greedy("mlp", PROMPT, 4)
        assert [len(resolver.asked) for resolver in (first, second, third)] == [1, 1, 0]

    def test_call_an_adapter_what_they_asked_for(self, world):
        [resolver] = register(a={"sql": world.request("qv"), "SQL": world.request("qv")})
        engine = world.engine()
        for request_id, name in enumerate(("sql", "SQL", "sql", "SQL")):
            engine.add_request(str(request_id), PROMPT, greedy(4), lora_request=name)

        outputs = run(engine)

        assert len(resolver.asked) == 2, "each name once"
        assert engine.list_loras() == {1}
        assert {output.lora_request.lora_name for output in outputs.values()} == {"sql"}

    def test_ask_again_when_the_adapter_has_been_unloaded(self, world):
        [resolver] = register(a={"sql": world.request("qv")})
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(4), lora_request="sql")
        run(engine)
        engine.remove_lora(1)
        resolver.answers["sql"] = world.request("all")

        engine.add_request("b", PROMPT, greedy(4), lora_request="sql")

        assert tokens_of(run(engine)["b"]) == world.oracle().greedy("all", PROMPT, 4)

    def test_are_refused_while_the_adapter_is_being_unloaded(self, world, two):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(4), lora_request="sql")
        engine.step()
        engine.remove_lora(stable_id("sql"))

        with pytest.raises(ValueError, match=r"'sql' .*is being unloaded"):
            engine.add_request("b", PROMPT, greedy(4), lora_request="sql")

    @pytest.mark.parametrize("call", ["generate", "add_request"])
    def test_can_come_from_a_running_event_loop(self, world, two, call):
        """As in a notebook, where every cell is run by one."""
        llm = world.llm()

        async def cell():
            if call == "generate":
                [answer] = llm.generate(PROMPT_DICT, greedy(4), use_tqdm=False, lora_request="sql")
                return answer
            llm.llm_engine.add_request("a", PROMPT, greedy(4), lora_request="sql")
            return run(llm.llm_engine)["a"]

        assert tokens_of(asyncio.run(cell())) == world.oracle().greedy("qv", PROMPT, 4)


class Sync(LoRAResolver):
    def resolve_lora(self, base_model_name, lora_name):
        return None


class TestRefused:
    @pytest.fixture
    def engine(self, world):
        """An engine at work."""
        engine = world.engine()
        engine.add_lora(world.request("all"))
        engine.add_request("running", PROMPT, greedy(6), lora_request=world.request("qv"))
        engine.step()
        return engine

    def refusal(self, engine, name):
        """What is said of a request for that name; the engine is as it was."""
        before = snapshot(engine)
        with pytest.raises(ValueError) as raised:
            engine.add_request("bad", PROMPT, greedy(), lora_request=name)
        assert snapshot(engine) == before
        return str(raised.value)

    @pytest.mark.parametrize("name", ["slq", "", "base", "../qv"])
    def test_is_a_name_that_nobody_knows_with_those_that_are_known(self, engine, name):
        register(store={}, disk={})

        assert self.refusal(engine, name).startswith(
            f"adapter '{name}' is unknown (known: all, qv; resolvers asked: store, disk); "
        )

    def test_is_every_unknown_name_without_resolvers(self, world):
        assert "(known: none; resolvers asked: none)" in self.refusal(world.engine(), "sql")

    def test_names_only_some_of_a_thousand(self, world):
        engine = world.engine()
        for number in range(20):
            alias = world.request("qv", lora_name=f"alias {number:02}")
            engine.add_request(str(number), PROMPT, greedy(), lora_request=alias)

        assert "alias 07 and 12 more; " in self.refusal(engine, "sql")

    @pytest.mark.parametrize(
        "error",
        [
            OSError("no route to the store"),
            RuntimeError("token expired"),
            KeyError("sql"),
            asyncio.CancelledError("timed out"),
        ],
    )
    def test_by_a_resolver_that_raises_it_is_named_and_no_other_asked(self, world, engine, error):
        _, _, last = register(a={}, store={"sql": error}, b={"sql": world.request("mlp")})

        message = self.refusal(engine, "sql")

        assert message == (f"LoRA resolver 'store' failed at adapter 'sql': {type(error).__name__}: {error}")
        assert last.asked == []

    @pytest.mark.parametrize("answer", ["/adapters/sql", 7, {"lora_name": "sql"}])
    def test_by_a_resolver_that_answers_something_else_it_is_named(self, engine, answer):
        register(store={"sql": answer})

        message = self.refusal(engine, "sql")

        assert "LoRA resolver 'store' must answer a LoRARequest or None" in message
        assert repr(answer) in message

    def test_by_a_resolver_that_is_not_async_it_is_named(self, engine):
        LoRAResolverRegistry.register_resolver("store", Sync())

        assert "LoRA resolver 'store' failed at adapter 'sql'" in self.refusal(engine, "sql")

    def test_is_every_name_by_an_engine_without_lora_which_asks_nobody(self, world):
        [resolver] = register(store={"sql": world.request("qv")})

        message = self.refusal(world.engine(enable_lora=False), "sql")

        assert message == (
            "request 'bad' names adapter 'sql' but LoRA is off; start the engine with enable_lora=True"
        )
        assert resolver.asked == []

    def test_is_a_bad_prompt_and_the_adapter_that_was_found_is_not_kept(self, world, engine):
        register(store={"sql": world.request("mlp")})
        before = snapshot(engine)

        with pytest.raises(ValueError, match="empty prompt"):
            engine.add_request("bad", [], greedy(), lora_request="sql")

        assert snapshot(engine) == before

    def test_is_a_whole_generate_call_for_one_unknown_name(self, world):
        register(store={"sql": world.request("qv")})
        llm = world.llm()

        with pytest.raises(ValueError, match="'slq' is unknown"):
            llm.generate([PROMPT_DICT] * 2, greedy(), use_tqdm=False, lora_request=["sql", "slq"])

        assert not llm.llm_engine.has_unfinished_requests()
