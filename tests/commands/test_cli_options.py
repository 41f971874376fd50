"""Options: nonsense is refused before anything is loaded, and messages name those that the command has."""

import logging
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import minivllm
from minivllm.cli import app, main
from minivllm.commands.engine_options import DEFAULTS, ROWS
from minivllm.commands.options import options_of, with_options_of
from minivllm.commands.serve import adapters_of
from minivllm.config import LoRAConfig
from minivllm.engine_args import EngineArgs
from minivllm.errors import EngineDeadError
from minivllm.models.demo_model import _silence_library_bars
from tests.worlds.waiting import PATIENCE

run = CliRunner().invoke
ROOT = typer.main.get_command(app)


class TestBench:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--rounds", "0"], "greater than or equal to 1"),
            (["--rounds", "-3"], "greater than or equal to 1"),
            (["--max-tokens", "0"], "greater than or equal to 2"),
            (["--max-tokens", "481"], "less than or equal to 480"),
            (["--threads", "0"], "greater than or equal to 1"),
            (["--against", "vllm"], "there is no 'vllm'; give any of transformers, peft"),
            (["--against", "PEFT"], "there is no 'PEFT'; give any of transformers, peft"),
            (["--against", "peft,peft"], "'peft' is named twice"),
            (["--against", "transformers,"], "has an empty name in it"),
            (["--against", ","], "has an empty name in it"),
        ],
    )
    def test_refuses_what_it_cannot_measure_and_says_what_it_can(self, monkeypatch, arguments, said):
        monkeypatch.setitem(sys.modules, "benchmarks.cpu", None)  # whoever imports it fails

        result = run(app, ["bench", "cpu", *arguments], env={"COLUMNS": "200"})

        assert result.exit_code == 2
        assert said in " ".join(result.output.replace("│", " ").split())

    def test_a_peer_that_is_not_installed_is_refused(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

        result = run(app, ["bench", "cpu", "--against", "peft"], env={"COLUMNS": "200"})

        assert result.exit_code == 2 and "peft is not installed" in result.output

    def test_what_it_can_measure_it_is_told_to(self, monkeypatch):
        told = []
        monkeypatch.setattr("benchmarks.cpu.run_bench", lambda *a: told.append(a))

        run(app, ["bench", "cpu", "--against", "peft, transformers", "--rounds", "1", "--threads", "2"])
        run(app, ["bench", "cpu"])

        assert told == [(["peft", "transformers"], 64, 1, 2, False), ([], 64, 3, None, False)]


class TestServe:
    @pytest.mark.parametrize(
        ("arguments", "slots"),
        [
            ([], 4),
            (["--max-cpu-loras", "9"], 4),
            (["--max-cpu-loras", "2"], 2),
            (["--max-cpu-loras", "2", "--max-loras", "1"], 1),
        ],
    )
    def test_on_a_cpu_has_no_more_slots_than_adapters_in_memory(self, monkeypatch, arguments, slots):
        told = []
        monkeypatch.setattr("minivllm.commands.serve.run_serve", lambda given, options: told.append(options))

        run(app, ["serve", "--device", "cpu", *arguments])

        [options] = told
        config = LoRAConfig(max_loras=options.get("max_loras"), max_cpu_loras=options.get("max_cpu_loras"))
        assert config.on_device("cpu").max_loras == slots


class TestEngineOptions:
    """Of `serve`: a command has a row for every field of `EngineArgs`, and its defaults are the fields'."""

    def test_are_those_of_the_engine_and_all_of_them(self):
        # warm_up: steps before the first request, which a server always takes. model: MODEL. enable_lora: always on.
        by_themselves = {"model", "enable_lora", "warm_up", "enable_lora_bias"}

        assert {row.name for row in ROWS} == {field.name for field in fields(EngineArgs)} - by_themselves

    def test_show_the_default_that_holds(self):
        defaults = {field.name: field.default for field in fields(EngineArgs)} | DEFAULTS
        shown = {row.name: row.annotation.__metadata__[0].show_default for row in ROWS}
        # Where it is None, or off, the help says in words what follows from that, or nothing.
        said = {
            name: "on" if value is True else str(value)
            for name, value in defaults.items()
            if value or value == 0
        }

        assert {name: text for name, text in shown.items() if text and name in said} == {
            name: said[name] for name in shown if name in said and defaults[name] is not False
        }

    @pytest.mark.parametrize(
        ("arguments", "options"),
        [
            ([], {}),
            (
                ["--max-num-seqs", "8", "--max-num-batched-tokens", "512"],
                {"max_num_seqs": 8, "max_num_batched_tokens": 512},
            ),
            (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
            (["--max-model-len", "256", "--block-size", "32"], {"max_model_len": 256, "block_size": 32}),
            (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
            (["--enable-lora", "--fully-sharded-loras"], {"fully_sharded_loras": True}),
            (["--chat-template", "x.jinja"], {"chat_template": "x.jinja"}),
            (["--num-gpu-blocks-override", "9", "-tp", "2"], {"num_kv_blocks": 9, "tensor_parallel_size": 2}),
            (
                ["--lora-target-modules", "q_proj", "--lora-target-modules", "v_proj"],
                {"target_modules": ["q_proj", "v_proj"]},
            ),
        ],
        ids=str,
    )
    def test_reach_the_engine_as_they_were_given(self, monkeypatch, arguments, options):
        told = []
        monkeypatch.setattr("minivllm.commands.serve.run_serve", lambda given, options: told.append(options))

        result = run(app, ["serve", *arguments])

        assert (result.exit_code, told) == (0, [{**DEFAULTS, **options}]), result.output

    @pytest.mark.parametrize("command", ["serve", "generate", "inspect", "demo"])
    def test_have_their_whole_names_in_the_help_of_a_narrow_terminal(self, command):
        shown = run(app, [command, "--help"], env={"COLUMNS": "80"}).output

        assert set(options_of(ROOT.commands[command])) <= set(re.findall(r"--[a-z-]+", shown))


class TestAdaptersOfServe:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--lora-modules", "a=x", "b=y", "--port", "0", "model"],
            ["model", "--lora-modules", "a=x", "--lora-modules", "b=y"],
            ["model", "--enable-lora", "--lora-modules", "a=x", '{"name": "b", "path": "y"}'],
            ["--lora-modules", '{"name": "a", "path": "x"}', "b=y", "model"],
            ["--lora-modules", "a=x", "b=y", "--model", "model", "--port", "0"],
            ["--model=model", "--lora-modules", "a=x", "b=y"],
            ["model", "--enable_lora", "--lora_modules", "a=x", "b=y", "--api_key=a_b"],
        ],
        ids=str,
    )
    def test_may_be_given_as_to_vllm(self, monkeypatch, arguments):
        told = []
        monkeypatch.setattr("minivllm.commands.serve.run_serve", lambda given, options: told.append(given))

        run(app, ["serve", *arguments], catch_exceptions=False)

        [given] = told
        assert given["model"] == "model"
        found = adapters_of(given["lora_modules"], given["model"])
        assert [(adapter.lora_name, adapter.lora_path) for adapter in found] == [("a", "x"), ("b", "y")]

    def test_may_say_what_their_model_is_called(self):
        [adapter] = adapters_of(['{"name": "a", "path": "x", "base_model_name": "org/base"}'], None)

        assert adapter.base_model_name == "org/base"

    @pytest.mark.parametrize(
        "spec", ["a", "=x", "a=", "{", '{"name": "a"}', '{"name": "a", "path": "x", "rank": 8}']
    )
    def test_are_refused_in_any_other_form(self, spec):
        with pytest.raises(ValueError, match=r"--lora-modules .* is not of the form"):
            adapters_of([spec], None)


class TestMessages:
    RANK = "rank 64 is greater than max_lora_rank 16; pass --max-lora-rank 64."

    def test_name_an_option_that_the_command_has(self):
        assert with_options_of(ROOT, ["generate", "--model", "x"], self.RANK) == self.RANK
        assert with_options_of(ROOT, ["inspect", "x"], self.RANK) == self.RANK

    @pytest.mark.parametrize("arguments", [["demo"], ["bench", "cpu"], []])
    def test_name_what_python_calls_it_where_the_command_has_no_such_option(self, arguments):
        told = with_options_of(ROOT, arguments, self.RANK)

        assert told == "rank 64 is greater than max_lora_rank 16; pass max_lora_rank=64 from Python."

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("pass --enable-lora-bias.", "pass bias_enabled from Python."),
            (
                "pass --long-lora-scaling-factors 2.0,4.0.",
                "pass long_lora_scaling_factors=2.0,4.0 from Python.",
            ),
            ("shorten it or raise --max-model-len", "shorten it or raise max_model_len from Python"),
            ("pass --dtype bfloat16 or float32", "pass --dtype bfloat16 or float32"),
            ("no adapter '--modelled' or 'a--model-b'", "no adapter '--modelled' or 'a--model-b'"),
        ],
    )
    def test_leave_alone_what_is_no_foreign_option(self, text, told):
        assert with_options_of(ROOT, ["demo"], text) == told

    @pytest.mark.parametrize(
        ("file", "said"), [("no-such-file", "No such file or directory"), (".", "Is a directory")]
    )
    def test_of_the_system_name_the_file_and_no_number(self, monkeypatch, capsys, file, said):
        monkeypatch.setattr(sys, "argv", ["minivllm", "generate", "--file", file])

        with pytest.raises(SystemExit) as end:
            main()

        assert end.value.code == 2
        assert capsys.readouterr().err == f"error: {file}: {said}\n"

    def test_of_an_engine_that_ends_at_the_start_is_all_that_is_said(self, monkeypatch, capsys):
        def end(*_: object, **__: object) -> None:
            raise EngineDeadError("the engine's process has ended (killed by signal 9)")

        monkeypatch.setattr("minivllm.commands.serve.run_serve", end)
        monkeypatch.setattr(sys, "argv", ["minivllm", "serve"])

        with pytest.raises(SystemExit):
            main()

        told = "error: the engine's process has ended (killed by signal 9)\n"
        assert capsys.readouterr().err == told

    def test_every_option_that_the_engine_names_is_one_of_some_command(self):
        known = {
            option for name in ("generate", "inspect", "serve") for option in options_of(ROOT.commands[name])
        }
        package = Path(minivllm.__file__).parent
        named = {
            option
            for path in package.rglob("*.py")
            if path.parent != package and path.parent.name != "commands"
            for option in re.findall(r"(?:pass|raise) (--[a-z-]+)", path.read_text(encoding="utf-8"))
        }

        assert named >= {"--max-lora-rank", "--enable-lora-bias"}
        assert named <= known


class TestRemarks:
    @pytest.mark.nightly
    @pytest.mark.parametrize("command", ["minivllm.cli", "labs.kit.cli"])
    def test_no_command_passes_on_what_torchao_says_of_missing_hardware(self, command):
        pytest.importorskip("torchao")

        ran = subprocess.run(
            [sys.executable, "-c", f"import {command}, peft"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")

    def test_nor_does_the_demo_model_s_conversion_in_anybody_s_program(self):
        logger = logging.getLogger("somebody")

        with _silence_library_bars():
            inside = logger.isEnabledFor(logging.WARNING)

        assert (inside, logger.isEnabledFor(logging.WARNING)) == (False, True)


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_commands_have_threads_wait_a_while_unless_somebody_has_said_how(given, spins):
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os, sys, minivllm.cli; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"

    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | given,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    assert ran.stdout.split() == [spins, "False"], ran.stderr


class TestAllCommands:
    def test_the_version_is_that_of_the_package_also_as_a_module(self):
        said = subprocess.run([sys.executable, "-m", "minivllm", "--version"], capture_output=True, text=True)

        assert said.stdout == f"minivllm {minivllm.__version__}\n"

    @pytest.mark.parametrize("command", ["generate", "serve", "demo"])
    def test_a_level_that_is_none_is_refused_by_name(self, command):
        result = run(app, [command, "--log-level", "loud"])

        assert result.exit_code == 2
        assert "'loud' is no level; use debug, info, warning or error" in re.sub(
            r"[\s│]+", " ", result.output
        )

    def test_a_level_is_the_packages(self):
        logger = logging.getLogger("minivllm")
        before = logger.level
        try:
            run(app, ["generate", "--log-level", "debug", "--model", "nowhere", "hello"])
            assert logger.level == logging.DEBUG
        finally:
            logger.setLevel(before)
