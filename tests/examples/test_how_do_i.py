"""The Python of docs/how-do-i.md runs, from top to bottom."""

import gc
import re
from pathlib import Path

import pytest

from minivllm import AsyncLLM
from minivllm.sources.resolver import LoRAResolverRegistry

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-do-i.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.M)[1:]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def test_twenty_questions_and_more_have_an_answer_with_a_command_code_or_a_page():
    assert len(SECTIONS) >= 20
    for section in SECTIONS:
        title, answer = section.split("\n", 1)
        assert title.startswith("... ") and title.endswith("?")
        assert "\n    " in answer or "```" in answer or "](" in answer, title


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_python_runs_from_top_to_bottom(tmp_path, monkeypatch):
    (tmp_path / "adapters").symlink_to(ROOT / "adapters")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        LoRAResolverRegistry, "resolvers", {}
    )  # what is registered stays for a process's life
    names = {"__name__": "how_do_i"}

    for section in SECTIONS:
        for block in BLOCK.findall(section):
            exec(compile(block, section.partition("\n")[0], "exec"), names)

    async_llm = AsyncLLM.from_engine(names["engine"])
    text = names["asyncio"].run(names["stream"](async_llm))
    async_llm.shutdown()
    assert text and (tmp_path / "out" / "debug.json").stat().st_size > 1000
    names.clear()
    gc.collect()
