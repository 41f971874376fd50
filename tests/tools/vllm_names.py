"""Which names vLLM 0.22.1 has, for those that the chapters cite.

`python -m tests.tools.vllm_names <package folder of vLLM 0.22.1>` writes vllm_names.json, and only that needs vLLM.
Tests read the file.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".json")
CODE_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
PATH = re.compile(r"vllm/[\w/]+(\.py|/)?")


def cited(text: str) -> set[str]:
    """What stands in backticks outside code blocks."""
    return set(IN_BACKTICKS.findall(CODE_BLOCK.sub("", text)))


def looks_like_a_name(token: str) -> bool:
    """Whether it is code that could be wrong: with an underscore, a dot or an inner capital."""
    inner = token.removesuffix("()")
    marked = "_" in inner.strip("_") or "." in inner or bool(re.search(r"[a-z][A-Z]", inner))
    return bool(IDENTIFIER.fullmatch(token)) and (marked or token.endswith("()"))


def parts_of(token: str) -> list[str]:
    return token.removesuffix("()").split(".")


def pages() -> list[Path]:
    return sorted(
        [*ROOT.glob("phases/*/README.md"), *ROOT.glob("solutions/*/README.md"), *ROOT.glob("docs/*.md")]
    )


def main(package: Path) -> None:
    tokens = set().union(*(cited(page.read_text()) for page in pages()))
    wanted = {part for token in tokens if looks_like_a_name(token) for part in parts_of(token)}
    sources = {path: path.read_text(errors="replace") for path in package.rglob("*.py")}
    there = {name for text in sources.values() for name in wanted & set(re.findall(r"\w+", text))}
    paths = {token.rstrip("/") for token in tokens if PATH.fullmatch(token)}
    known = sorted(path for path in paths if (package.parent / path).exists())
    FILE.write_text(
        json.dumps({"version": "0.22.1", "paths": known, "names": sorted(there)}, indent=1) + "\n"
    )
    print(f"{len(there)} names and {len(known)} paths; not there: {sorted(paths - set(known))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
