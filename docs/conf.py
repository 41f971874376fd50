"""The site: chapters, notebooks and solutions where they lie, and the pages of docs/ around them.

The repository's root is the source, so that relative links between pages hold here as they do in a file browser.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "minivllm"
author = "the minivllm authors"
copyright = "the minivllm authors, Apache-2.0"
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/*.ipynb",
    "phases/**",
    "solutions/**",
    "labs/*/contracts/*.md",
    "benchmarks/README.md",
    "examples/README.md",
    "minivllm/simulate/traces/README.md",
    "adapters/README.md",
    "adapters/*/README.md",
]
exclude_patterns = ["**/.ipynb_checkpoints", "docs/_static/**", "**/__pycache__", "**/picture.py"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist", "dollarmath"]
nb_execution_mode = "off"  # outputs are committed, and tests hold them against a fresh run
nb_merge_streams = True
highlight_language = "none"  # docstrings; code says its language
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# An attribute whose value is another module's class would have that module's page link back to the wrong place.
viewcode_follow_imported_members = False

html_theme = "furo"
html_title = "minivllm"
html_extra_path = ["_extra"]
html_static_path = ["_static"]
html_css_files = ["minivllm.css"]
templates_path = []

FOLDER_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#\s]+)\)")


LITERAL = re.compile(r'<code class="docutils literal notranslate">.*?</code>', re.S)


def unlink_folders(page: str, text: str) -> str:
    """Links to folders as plain text: a site has no page for them."""

    def plain(match: re.Match) -> str:
        return match[1] if (ROOT / page).parent.joinpath(match[2]).is_dir() else match[0]

    return FOLDER_LINK.sub(plain, text)


def hide_answers(text: str) -> str:
    """A page of solutions with each one folded away under its heading."""
    head, *exercises = re.split(r"^(?=## )", text, flags=re.M)
    folded = [
        re.sub(
            r"\A(## [^\n]*\n)(.*)\Z",
            r"\1\n<details class='spoiler'><summary>Show the answer</summary>\n\n\2\n\n</details>\n\n",
            exercise,
            flags=re.S,
        )
        for exercise in exercises
    ]
    return head + "".join(folded)


def prepare_page(app: object, page: str, source: list[str]) -> None:
    source[0] = unlink_folders(page, source[0])
    if page.startswith("solutions/0"):
        source[0] = hide_answers(source[0])


def plain_docstring(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Docstrings are plain text, set as it stands: their columns of names and meanings line up."""
    text = [line.rstrip() for line in lines]
    if not any(text):
        return
    lines[:] = ["::", "", *("    " + line for line in text), ""]


def break_names(app: object, page: str, template: str, context: dict, doctree: object) -> None:
    """Names in code may break after dots, underscores and slashes and before words, before they break anywhere."""

    def broken(code: re.Match) -> str:
        return re.sub(r"((?<=\w)[._/](?=\w)|(?<=[A-Za-z])(?=[A-Z][a-z]))(?![^<]*>)", r"\1<wbr>", code[0])

    context["body"] = LITERAL.sub(broken, context.get("body", ""))


def setup(app: object) -> None:
    app.connect("html-page-context", break_names)
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", plain_docstring)
