"""The rooms of the house: which files are the core's two books, and what of them breaks a rule.

`python tests/helpers/house.py` writes what breaks one today into tests/house_debt.toml.
"""

import ast
import sys
import tomllib
from pathlib import Path

from imports import import_circles

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minivllm"
DEBT = ROOT / "tests" / "house_debt.toml"

HEAD = "# What breaks a rule of the house today (tests/helpers/house.py), until it is mended.\n"

Excess = dict[str, dict[str, int]]  # file or book -> what is too much of it -> how much there is

# Around book A, all that is not named here is in it.
BESIDE_A = ("checks.py", "scattered_reads.py", "timed_patterns.py")
# Around book B: warm-up, threads, what draws tokens, several answers to a prompt; reports of steps.
BESIDE_WORKER = ("cpu_threads", "row_sampler", "prompt_logprobs", "token_masks")
BESIDE_ENGINE = ("metrics", "parallel_sampling")

# What the core never imports.
OUTSIDE = ("minivllm.vllm", *(f"minivllm.lora.{name}" for name in ("options", "io", "gpu")))
COMPOSITION_ROOT = PACKAGE / "lora" / "__init__.py"


def books() -> dict[str, list[Path]]:
    """Their files. What stands in the core's folders and is not named above is in a book."""
    lora = PACKAGE / "lora"
    return {
        "book A": [
            path
            for path in sorted(lora.rglob("*.py"))
            if not path.relative_to(lora).as_posix().startswith(BESIDE_A)
        ],
        "book B": [
            path
            for folder, beside in (("core", ()), ("worker", BESIDE_WORKER), ("engine", BESIDE_ENGINE))
            for path in sorted((PACKAGE / folder).rglob("*.py"))
            if path.stem not in beside
        ],
    }


def imports_outwards() -> Excess:
    """By the core, those for annotations and inside functions counted. The composition root may import all."""
    found: Excess = {}
    for path in [path for files in books().values() for path in files if path != COMPOSITION_ROOT]:
        for module in outward(path.read_text(encoding="utf-8")):
            found.setdefault(name_of(path), {})[module] = 1
    return found


def circles() -> Excess:
    """Of imports, anywhere in the package, those for annotations counted: each module and how many go round with it."""
    return {
        name_of(_path_of(module)): {"modules in a circle": len(circle)}
        for circle in import_circles(PACKAGE)
        for module in circle
    }


def _path_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def outward(text: str) -> list[str]:
    """The modules of other rings that a module of the core imports."""
    tree = ast.parse(text)
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            found |= {ring for ring in OUTSIDE if f"{name}.".startswith(f"{ring}.")}
    return sorted(found)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def owed(rule: str) -> Excess:
    """What breaks a rule at present, and may until it is mended."""
    return tomllib.loads(DEBT.read_text(encoding="utf-8")).get(rule, {})


def compare(rule: str, found: Excess, debt: Excess) -> list[str]:
    """Sentences about what grew or is new, and about what is owed no longer."""
    said = []
    for where, measures in found.items():
        for what, number in measures.items():
            limit = debt.get(where, {}).get(what)
            if limit is None or number > limit:
                said.append(f"{rule}, {where}: {what} = {number}, {DEBT.name} has {limit}")
    for where, measures in debt.items():
        settled = [what for what in measures if what not in found.get(where, {})]
        said += [f"{rule}, {where}: {what} is settled, {DEBT.name} still has it" for what in settled]
    return said


RULES = (imports_outwards, circles)


def as_toml(rule: str, excess: Excess) -> str:
    """A blank line after each file, so that two people's changes merge."""
    text = ""
    for where in sorted(excess):
        text += f'[{rule}."{where}"]\n'
        text += "".join(f'"{what}" = {number}\n' for what, number in sorted(excess[where].items())) + "\n"
    return text


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # A test measures a plain adapter's life: what it owes stays as it is.
    tables = {rule.__name__: rule() for rule in RULES} | {"plain_life": owed("plain_life")}
    text = "".join(as_toml(rule, excess) for rule, excess in tables.items()).rstrip("\n")
    DEBT.write_text(f"{HEAD}\n{text}\n", encoding="utf-8")
