"""The checkout without one of its extensions, and all tests there that are not the extension's.

`python -m tests.tools.take_away NAME [PYTEST'S ARGUMENTS]` takes one away and runs them; without a name it is the
night's: they take turns. Exit status 1 and a list of tests where the extension was missed.
`--list` says which tests are each extension's.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.tools.house import CORE_FOLDERS, ROOT
from tests.tools.nights import of_night

PARTS = (
    *("minivllm", "labs", "tests", "solutions", "phases", "docs", "adapters", "benchmarks", "examples"),
    *("deploy", "pyproject.toml", "Makefile", "README.md", "constraints.txt"),
)

# Every folder beside the core, and the modules of others that cannot be imported without it. Those that the engine is
# put together from have their line in assembly.py; those on top have none, because nothing below knows them.
NEEDED_BY: dict[str, tuple[str, ...]] = {
    "options": ("gpu.pages.two_step_slots", "gpu.triton_two_step_slots", "vllm"),
    "sources": (
        "vllm",
        "serving",
        "server",
        "commands.adapter_folder",
        "commands.generate",
        "commands.serve",
    ),
    "policies": ("simulate", "commands.simulate"),
    # Kernels for peers' memory share their parts with the GPU's; the simulator has the pages and graphs of a GPU.
    "gpu": ("vllm", "parallel.peers.norm_op", "simulate", "commands.simulate"),
    "parallel": (),
    "parallel.peers": (),
    "ahead": (),
    "alora": (),
    "dora": (),
    "mixes": (),
    "observe": ("serving", "server", "simulate", "commands"),
    "sizing": ("economics",),
    "versions": (),
    # The simulator reads adapters by the same policy, on its own clock.
    "serving": ("server", "commands.serve", "simulate", "commands.simulate"),
    "vllm": (),
    "server": ("commands.serve",),
    "simulate": ("commands.simulate",),
    "commands": ("cli", "__main__"),
}
ON_TOP = ("serving", "vllm", "server", "simulate", "commands")

# Part of an extension that can be taken away alone: the file that knows it, and the lines there that do.
INNER = {
    "parallel.peers": (
        "parallel/ranks.py",
        (
            "from minivllm.parallel.peers.group import make_peer_group\n",
            '    if torch.device(device).type == "cuda" and not parallel_config.disable_custom_all_reduce:\n',
            "        return make_peer_group(device)\n",
        ),
    )
}

# Tests that are an extension's although no import says so, by what their names begin with: `tests/FILE::TEST`.
TESTS: dict[str, tuple[str, ...]] = {
    "alora": ("tests/alora/",),
    # They send signals to `minivllm serve`.
    "commands": tuple(
        f"tests/server/test_server_drain::{test}"
        for test in ("test_a_second_signal_", "test_a_signal_ends_", "test_the_command_ends_")
    ),
    # The last one knows what the refusal says where the option is there.
    "dora": (
        "tests/dora/",
        "tests/lora/test_refusals::test_what_peft_trains_and_the_engine_does_not_serve[DoRA]",
    ),
    # It names what of observe runs for a plain adapter; and what is refused is shown to change nothing, by debug_info.
    "observe": (
        "tests/engine/test_plain_life::test_it_enters_nothing_around_the_core_but_what_is_named",
        *("tests/observe/", "tests/lora/test_refusals::"),
    ),
    # Adapters on embeddings and the head, on experts, with biases or tokens; and what is refused of them by name.
    "options": (
        "tests/options/",
        "tests/alora/test_activated_tokens::",
        "tests/alora/test_invocation::test_an_adapter_with_a_longer_context_is_refused",
        "tests/alora/test_invocation::test_peft_does_not_adapt_embeddings_so",
        "tests/alora/test_shared_prefixes::test_logprobs_of_a_prompt_",
        "tests/commands/test_cli_options/TestMessages::test_every_option_that_the_engine_names_",
        "tests/dora/test_dora_adapters::test_embeddings_and_the_head_",
        "tests/engine/test_failed_reloads/TestWhatPromptsDependOn::",
        "tests/gpu/test_embeddings_in_graphs::",
        *(
            f"tests/lora/test_adapter_bytes::test_an_adapter_takes_what_is_told[{k}]"
            for k in ("embeddings", "biases")
        ),
        "tests/lora/test_adapter_bytes::test_an_adapter_takes_what_is_told[experts]",
        "tests/lora/test_adapter_plans::test_what_is_not_plain_",
        "tests/lora/test_bad_adapters/TestConfigs::test_with_too_many_target_parameters_",
        "tests/lora/test_fused_adapters::",
        "tests/parallel/test_norms_that_sum::test_biases_",
        "tests/parallel/test_shared_adapters::",
        "tests/phase_01/test_lora_model::test_a_bias_",
        "tests/phase_01/test_peft_helper::test_what_the_engine_cannot_serve_is_refused_by_name[",
        "tests/phase_01/test_target_parameters::",
        "tests/phase_02/test_adapter_fit::test_every_part_of_every_expert_",
        "tests/phase_02/test_adapter_fit::test_what_a_layer_has_no_room_for_",
        "tests/sizing/test_memory_accounting::test_slots_that_can_never_fit_",
        "tests/sizing/test_memory_accounting::test_what_makes_slots_too_large_is_named[",
        "tests/sources/test_malformed_adapters/TestTokenizers::",
        "tests/test_economics::test_an_adapter_of_a_sparse_model_",
        "tests/worker/test_prompt_logprobs::",
    ),
    # Adapters that are no folders of safetensors: pickles, tensors in memory, ids of a hub; and a command that asks it.
    "sources": (
        "tests/sources/",
        "tests/commands/test_inspect::test_a_pickle_fits_",
        "tests/commands/test_inspect::test_an_id_that_the_hub_does_not_have_",
        "tests/layers/test_quantized_base/TestOptions::test_the_command_line_has_it",
        "tests/lora/test_bad_adapters::test_damaged_bytes_never_come_out_as_anything_but_a_refusal[adapter_model.bin]",
        "tests/lora/test_refusals::test_a_folder_that_is_damaged[a pickle ",
        "tests/options/legacy/test_added_tokens/TestTokens::test_come_with_an_adapter_in_torchs_own_format_",
        "tests/phase_01/test_lora_model::test_a_bin_file_",
        "tests/phase_01/test_lora_model::test_shapes_alone_can_be_read_without_the_numbers[adapter_model.bin]",
    ),
    # They ask for its backends by name, or plan the memory of a GPU's slots.
    "gpu": (
        "tests/gpu/",
        "tests/commands/test_tiny_demo::",
        "tests/options/test_embedding_lora::test_every_backend_gives_them[",
        "tests/worker/test_prompt_logprobs::test_23_of_an_adapter_on_lm_head_are_its_own_on_every_backend[",
        "tests/test_economics::test_a_plan_without_room_says_what_takes_it[",
    ),
    # It names what of versions runs for a plain adapter.
    "versions": ("tests/engine/test_plain_life::test_it_enters_nothing_around_the_core_but_what_is_named",),
}
# Those that look at all folders, so that each extension has something in them: the maps of vLLM's names, links of
# chapters, the list of extensions, and the course, which has exercises and hunts in most folders and grades them by
# tests that import others.
OF_ALL = (
    *("tests/phases/test_map::", "tests/phases/test_chapters::", "tests/test_take_away::"),
    *("tests/kit/", "tests/phase_08/test_hunts::"),
    "tests/vllm/test_vllm_names::test_a_name_is_where_the_page_says_",
)

# What a test that needs the extension fails with: its import, or the answer to an option that needs it.
MISSED = r"No module named 'minivllm\.{0}\b|minivllm\.{0}, which is not there"

# `pip install -e` has Python find in the checkout whatever module of minivllm it finds nowhere else.
NOWHERE_ELSE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""


def find_nothing_elsewhere(root: Path) -> None:
    """Have a Python whose path begins with this folder find the folder's package, and none of the checkout's."""
    (root / "sitecustomize.py").write_text(NOWHERE_ELSE)


def extensions() -> list[str]:
    """All folders of the package that are no part of the core, and the inner ones that go alone."""
    folders = {path.parent.name for path in (ROOT / "minivllm").glob("*/__init__.py")}
    return sorted((folders | INNER.keys()) - set(CORE_FOLDERS))


def own_files(name: str) -> list[str]:
    """Files of tests that cannot be collected without the extension: they import it, by way of others or not."""
    gone = tuple(f"minivllm.{module}." for module in (name, *NEEDED_BY[name]))
    imports = {name_of(path): module_imports(path) for path in (ROOT / "tests").rglob("*.py")}
    needing = {name for name, modules in imports.items() if any(f"{m}.".startswith(gone) for m in modules)}
    while more := {name for name, modules in imports.items() if modules & needing} - needing:
        needing |= more
    files = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if name_of(path) in needing)
    return [str(path.relative_to(ROOT)) for path in files]


def name_of(path: Path) -> str:
    """What tests import a file by: `tests.worlds.engines`, and its own name alone where it is beside them."""
    shared = path.parent.name in ("worlds", "oracles", "tools")
    return f"tests.{path.parent.name}.{path.stem}" if shared else path.stem


def module_imports(path: Path) -> set[str]:
    """What a file imports as it is imported itself: `import a.b` is a.b, and `from a import b` is a and a.b."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def take_away(name: str, root: Path) -> Path:
    """Copy the checkout to `root`, without the extension's folder and the lines that name it; gives the package."""
    root.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / part)
    find_nothing_elsewhere(root)
    contracts = root / "pyproject.toml"
    contracts.write_text(without_contracts_of(name, contracts.read_text()))
    package = root / "minivllm"
    shutil.rmtree(package.joinpath(*name.split(".")))
    if name not in ON_TOP:
        own = f"from minivllm.{name} import {name.upper()}\n", f"    {name.upper()},\n"
        file, own = INNER.get(name, ("assembly.py", own))
        lines = (package / file).read_text().splitlines(keepends=True)
        assert all(lines.count(line) == 1 for line in own), own
        (package / file).write_text("".join(line for line in lines if line not in own))
    return package


def without_contracts_of(name: str, text: str) -> str:
    """pyproject.toml without import-linter's contracts about an extension: it refuses modules that are not there."""
    begin = "[[tool.importlinter.contracts]]"
    about = re.compile(rf'"minivllm\.{re.escape(name)}[."]')
    before, *contracts = text.split(begin)
    return begin.join([before, *(contract for contract in contracts if not about.search(contract))])


def run_there(root: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess:
    """Run a Python that finds the copy first, in its folder."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, cwd=root, env=environment)


def outcome(name: str, report: Path) -> tuple[list[str], list[str], int]:
    """Of a report in JUnit's form: the failed tests that need the extension, the others, and how many did not fail."""
    own, others, passed = [], [], 0
    missed = re.compile(MISSED.format(name))
    for case in ET.parse(report).iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error")]
        test = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        is_own = any(missed.search(f"{p.get('message')} {p.text}") for p in problems)
        if problems:
            (own if is_own or test.startswith((*OF_ALL, *TESTS.get(name, ()))) else others).append(test)
        passed += not problems
    return own, others, passed


def run_tests_without(name: str, root: Path, *arguments: str) -> tuple[list[str], list[str], int]:
    """Run tests in a copy: as `outcome`."""
    report = root / "report.xml"
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junit-xml={report}"]
    done = run_there(root, "-m", "pytest", *options, *arguments)
    if not report.exists():
        return [], [f"pytest itself: {done.stdout[-2000:]}{done.stderr[-2000:]}"], 0
    return outcome(name, report)


def main(arguments: list[str]) -> int:
    if arguments == ["--list"]:
        for name in extensions():
            print(name, *own_files(name), *TESTS.get(name, ()), sep="\n    ")
        return 0
    name = arguments[0] if arguments else of_night(names := extensions(), len(names))[0]
    with tempfile.TemporaryDirectory(prefix="taken-away-") as folder:
        root = Path(folder) / "checkout"
        take_away(name, root)
        workers = [] if any(argument.startswith("-n") for argument in arguments) else ["-n", "2"]
        ignored = own_files(name)
        left_out = [f"--ignore={file}" for file in ignored]
        own, others, passed = run_tests_without(name, root, *workers, *left_out, *arguments[1:])
    print(
        f"without {name}: {passed} passed, {len(own)} failed that need it, as {len(ignored)} files of tests do, "
        f"{len(others)} others failed"
    )
    print("\n".join(others))
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
