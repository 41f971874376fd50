"""Kernels of labs 4.2 and 4.3 compile for a GPU, also where none is: the interpreter takes more of Python."""

import re
from pathlib import Path

import pytest

import minivllm.gpu.sgmv.lora_expand_op as lora_expand_op
import minivllm.gpu.sgmv.lora_shrink_op as lora_shrink_op
from labs.kit.overlay import Todo, active
from tests.tools.device import compile_for_gpu

STUB = re.compile(r'static_assert\(False, "(lab \d+\.\d+: [^"]+)"')


def text_of(module):
    """The learner's, or ours. Todo if nobody has written it yet."""
    source = active().get(module.__name__)
    text = source.text if source else Path(module.__file__).read_text()
    if stub := STUB.search(text):
        raise Todo(stub[1])
    return text


def errors_of(what, text, folder):
    """The last of what the compiler says; empty if it has nothing to say."""
    path = folder / f"lora_{what}_op.py"
    path.write_text(text)
    done = compile_for_gpu(what, path, cache=folder)
    assert (done.stdout == "compiled\n") == (done.returncode == 0)
    return "\n".join(done.stderr.splitlines()[-12:]) if done.returncode else ""


@pytest.mark.lab("4.2")
@pytest.mark.nightly
def test_a_shrink_compiles_for_a_gpu(tmp_path):
    errors = errors_of("shrink", text_of(lora_shrink_op), tmp_path)

    assert not errors, f"the interpreter runs the kernel, but it does not compile for a GPU:\n{errors}"


@pytest.mark.lab("4.3")
def test_an_expand_compiles_for_a_gpu(tmp_path):
    errors = errors_of("expand", text_of(lora_expand_op), tmp_path)

    assert not errors, f"the interpreter runs the kernel, but it does not compile for a GPU:\n{errors}"


ONLY_INTERPRETED = {
    "a loop that is left early": "    while True:\n        break\n",
    "a block that is no power of two": "    tl.arange(0, 24)\n",
    "a list that grows": "    places = []\n    places.append(tl.program_id(0))\n",
}


@pytest.mark.nightly
@pytest.mark.parametrize("what", ONLY_INTERPRETED)
def test_what_only_the_interpreter_takes_is_told(tmp_path, what):
    text = text_of(lora_shrink_op)
    begin = text.index("tl.program_id(0)")
    line = text.rindex("\n", 0, begin) + 1

    errors = errors_of("shrink", text[:line] + ONLY_INTERPRETED[what] + text[line:], tmp_path)

    assert (
        len(errors.splitlines()) == 1 and "at: " + ONLY_INTERPRETED[what].splitlines()[-1].strip() in errors
    )
