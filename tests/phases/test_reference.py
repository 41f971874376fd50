"""The reference (docs/api.md) names modules that exist, each once. `make docs` refuses anything else."""

import importlib.util
import re
from collections import Counter

from demo_tasks import ROOT

MODULE = re.compile(r"^\.\. automodule:: (\S+)$", re.M)


def test_the_reference_names_modules_that_exist_each_once():
    modules = Counter(MODULE.findall((ROOT / "docs" / "api.md").read_text()))

    assert len(modules) > 50
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert [name for name, count in modules.items() if count > 1] == []
