"""The command line: what it reads, what it prints, how it fails."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from minivllm.cli import app
from minivllm.commands.common import parse_adapters
from minivllm.commands.generate import NamedPrompt, pick_adapter, read_prompts
from minivllm.sources.resolver import FilesystemResolver, LoRAResolverRegistry
from tests.worlds.adapters import save_adapter
from tests.worlds.models import transformers_model
from tests.worlds.waiting import PATIENCE

run = CliRunner().invoke


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with the demo model's tokenizer."""
    from transformers import AutoTokenizer

    from minivllm.models.demo_model import demo_model_path

    folder = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    transformers_model("llama-llama3-rope", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("adapters") / "loud"
    return save_adapter(
        folder, base, 3, r=4, lora_alpha=16, use_rslora=True, target_modules=["q_proj", "down_proj"]
    )


@pytest.fixture(autouse=True)
def no_resolvers(monkeypatch):
    """What a command registers stays for the life of its process; here it is one test's."""
    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {})


def generate(base, *arguments, **kwargs):
    options = ["--model", str(base), "--max-tokens", "6", "--json"]
    return run(app, ["generate", *options, *map(str, arguments)], **kwargs)


def test_prompts_go_to_the_adapters_they_name(base, adapter):
    result = generate(base, "--adapter", f"loud={adapter}", "loud: Say hi", "base: Say hi", "Say hi")

    records = json.loads(result.stdout)
    assert [r["adapter"] for r in records] == ["loud", "base", "base"]
    assert records[1]["text"] == records[2]["text"] != records[0]["text"]
    assert {r["prompt"] for r in records} == {"Say hi"}


def test_jsonl_on_stdin_picks_adapters_too(base, adapter):
    lines = [{"prompt": "Say hi", "adapter": "loud"}, {"prompt": "loud: is no adapter here"}]

    result = generate(base, "--adapter", f"loud={adapter}", input="\n".join(map(json.dumps, lines)))

    assert [r["adapter"] for r in json.loads(result.stdout)] == ["loud", "base"]


def test_adapters_are_found_by_name_in_a_folder_of_them(base, adapter):
    given = generate(base, "--adapter", f"x={adapter}", "x: Say hi")

    lines = ["loud: Say hi", "Note: Say hi", json.dumps({"prompt": "Say hi", "adapter": "loud"})]
    found = generate(base, "--adapter-folder", adapter.parent, input="\n".join(lines))

    records = json.loads(found.stdout)
    assert [(r["adapter"], r["prompt"]) for r in records] == [
        ("loud", "Say hi"),
        ("base", "Note: Say hi"),
        ("loud", "Say hi"),
    ]
    assert records[0]["text"] == records[2]["text"] == json.loads(given.stdout)[0]["text"]


def test_adapters_in_a_folder_may_know_the_model_by_another_name(base, adapter, tmp_path, caplog):
    shutil.copytree(adapter, tmp_path / "loud")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "somebody/else"
    (tmp_path / "loud" / "adapter_config.json").write_text(json.dumps(config))
    arguments = ["--adapter-folder", tmp_path, "loud: Say hi"]

    refused = generate(base, *arguments)
    found = generate(base, "--base-model-name", "somebody/else", *arguments)

    assert "'loud' is unknown" in str(refused.exception)
    assert "it was trained on 'somebody/else'" in caplog.text
    assert json.loads(found.stdout)[0]["adapter"] == "loud"


@pytest.mark.parametrize("command", ["generate"])
def test_factors_of_longer_contexts_are_numbers_with_commas(base, adapter, command):
    for text, complaint in (("2,x", "not of the form 2.0,4.0"), ("0.5", "numbers of at least 1")):
        arguments = [command, str(adapter), "--model", str(base), "--long-lora-scaling-factors", text]

        assert complaint in str(run(app, arguments).exception)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--adapter-folder", "/nowhere"], "adapter folder '/nowhere' does not exist"),
        (["--base-model-name", "a/b"], "pass that too"),
    ],
)
def test_a_folder_of_adapters_must_be_there_and_given(base, arguments, complaint):
    assert complaint in str(generate(base, *arguments, "Say hi").exception)


def test_inspect_tells_ranks_scaling_and_that_it_fits(base, adapter):
    result = run(app, ["inspect", str(adapter), "--model", str(base), "--json"])

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["fits"] and report["reasons"] == []
    assert report["rslora"] and report["rank"] == 4
    assert report["targets"]["q_proj"] == {
        "modules": 2,
        "ranks": [4],
        "scalings": [8.0],  # 16 / sqrt(4)
        "parameters": 2 * 4 * (48 + 48),
    }


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [(["loud"], "NAME=PATH"), (["=x"], "NAME=PATH"), (["a=x", "a=y"], "taken"), (["base=x"], "taken")],
)
def test_malformed_adapters_are_refused(specs, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_adapters(specs)


def test_an_adapter_that_was_not_given_is_named():
    with pytest.raises(ValueError, match="adapter 'sql' was not given; known: loud"):
        pick_adapter(NamedPrompt("Hi", "sql"), parse_adapters(["loud=somewhere"]))


def test_an_adapter_that_is_in_no_folder_either_is_named_with_it(tmp_path):
    with pytest.raises(ValueError, match=r"'\.\./sql' was not given and is not in '.*'; known: none"):
        pick_adapter(NamedPrompt("Hi", "../sql"), {}, FilesystemResolver(tmp_path))


def test_only_names_that_were_given_count_before_a_colon():
    adapters = parse_adapters(["loud=somewhere"])

    assert pick_adapter(NamedPrompt("Note: loud: x"), adapters) == ("Note: loud: x", None)
    assert pick_adapter(NamedPrompt(" loud : x: y"), adapters) == ("x: y", adapters["loud"])


def test_prompts_come_from_a_file_line_by_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text('one\n\n{"prompt": "two", "adapter": "a"}\n{not json\n')

    prompts = read_prompts(None, file)

    assert prompts == [NamedPrompt("one"), NamedPrompt("two", "a"), NamedPrompt("{not json")]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "prompt"),
        (b"\n \n", "prompt"),
        (b'{"adapter": "a"}', "prompt"),
        (b'{"prompt": ' + b"[" * 100_000, "^line 1 begins like JSON and is none"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "^line 1 begins like JSON and is none"),
        (b'{"prompt": "x", "adapter": "sql"', "^line 1 begins like JSON and is none"),
        (b' { "adapter" : "sql", "prompt": "x",}', "^line 1 begins like JSON and is none"),
        (b'{"prompt": "a", "adapter": ["x"]}', 'line 1: "adapter" must be a name'),
        (b"\xff\xfe", "prompts.txt is not UTF-8 text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_without_prompts_is_an_error_and_no_prompt_for_the_base_model(tmp_path, data, complaint):
    file = tmp_path / "prompts.txt"
    file.write_bytes(data)

    with pytest.raises(ValueError, match=complaint) as refusal:
        read_prompts(None, file)

    assert len(str(refusal.value)) < 500


def test_errors_are_one_sentence_and_exit_status_2(base, monkeypatch, capsys):
    import sys

    from minivllm.cli import main

    monkeypatch.setattr(
        sys, "argv", ["minivllm", "generate", "--model", str(base), "--adapter", "x=/no[/b]where", "x: hi"]
    )

    with pytest.raises(SystemExit) as exit_status:
        main()

    captured = capsys.readouterr()
    assert exit_status.value.code == 2
    assert "error: adapter 'x': adapter folder '/no[/b]where' does not exist" in " ".join(
        captured.err.split()
    )
    assert "Traceback" not in captured.err


def test_brackets_in_prompts_and_paths_are_shown_as_they_are(base, tmp_path):
    answered = run(app, ["generate", "--model", str(base), "--max-tokens", "3", "[/b] or [red]x"])
    inspected = run(app, ["inspect", str(tmp_path / "[/b]"), "--model", str(base)])

    assert answered.exit_code == 0
    assert "base: [/b] or [red]x" in answered.stdout
    assert inspected.exit_code == 1
    assert "[/b]" in inspected.stdout


def test_a_line_ends_at_a_newline_only(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"prompt": "one\u2028two"}\r\n', encoding="utf-8")

    assert read_prompts(None, file) == [NamedPrompt("one\u2028two", "base")]


def test_a_name_that_is_nearly_an_adapter_s_is_warned_of(capsys):
    adapters = parse_adapters(["sql=somewhere", "dates=there"])

    for text in ("sq1: How many", "date: tomorrow", "Note: a", "How many?", "sql: fine"):
        pick_adapter(NamedPrompt(text), adapters)

    first, second = capsys.readouterr().err.splitlines()
    assert "no adapter is called 'sq1'" in first and "is 'sql' meant?" in first
    assert "no adapter is called 'date'" in second and "is 'dates' meant?" in second


def test_an_answer_that_the_terminal_cannot_show_is_shown_escaped():
    code = (
        "import sys, minivllm.cli as cli; cli.app = lambda: sys.exit(print('h\\xe9 \\U0001f389')); cli.main()"
    )

    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    assert (ran.returncode, ran.stdout) == (0, "h\\xe9 \\U0001f389\n"), ran.stderr


def test_a_missing_package_is_an_error_of_one_sentence(monkeypatch, capsys):
    from minivllm import cli

    def without_package(*_: object) -> None:
        raise ModuleNotFoundError("package 'gguf' is not installed")

    monkeypatch.setattr(type(cli.app), "__call__", without_package)

    with pytest.raises(SystemExit) as exit_status:
        cli.main()

    assert exit_status.value.code == 2
    assert "error: package 'gguf' is not installed" in capsys.readouterr().err
