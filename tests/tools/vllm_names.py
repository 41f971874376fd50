"""Which names vLLM 0.22.1 has, for those that the chapters cite, and 0.33.0, for what has changed since.

`python -m tests.tools.vllm_names <package folder of vLLM 0.22.1> <that of 0.33.0>` writes vllm_names.json, and only
that needs vLLM. Tests read the file.
"""

import json
import re
import sys
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".json")
CODE_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
PATH = re.compile(r"vllm/[\w/]+(\.py|/)?")
wrap = TextWrapper(110, break_long_words=False, break_on_hyphens=False).wrap


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
    return sorted([*ROOT.glob("phases/*/*.md"), *ROOT.glob("solutions/*/README.md"), *ROOT.glob("docs/*.md")])


def since() -> str:
    """The map's section on what has changed since 0.22.1."""
    return (
        (ROOT / "docs" / "map-to-vllm.md")
        .read_text()
        .split("## Since vLLM 0.22.1\n")[1]
        .partition("\n## ")[0]
    )


def known() -> dict[str, Any]:
    """What the file says: `names` and `paths` of vLLM 0.22.1, and under `later` those of 0.33.0."""
    found = json.loads(FILE.read_text())
    for part in (found, found["later"]):
        part |= {kind: {*" ".join(part[kind]).split()} for kind in ("names", "paths")}
    return found


def cited_at(package: Path, tokens: set[str]) -> dict[str, list[str]]:
    """Those of the tokens that this package of vLLM has, as paths and as names."""
    wanted = {part for token in tokens if looks_like_a_name(token) for part in parts_of(token)}
    there = {
        name
        for path in package.rglob("*.py")
        for name in wanted & set(re.findall(r"\w+", path.read_text(errors="replace")))
    }
    paths = {token.rstrip("/") for token in tokens if PATH.fullmatch(token)}
    paths = {path for path in paths if (package.parent / path).exists()}
    return {kind: wrap(" ".join(sorted(found))) for kind, found in (("paths", paths), ("names", there))}


def main(package: Path, later: Path) -> None:
    tokens = set().union(*(cited(page.read_text()) for page in pages()))
    found = {"version": "0.22.1", **cited_at(package, tokens)}
    found["later"] = {"version": "0.33.0", **cited_at(later, cited(since()))}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(known()['names'])} names, {len(known()['later']['names'])} later ones")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
