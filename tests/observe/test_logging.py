"""What the log of "minivllm" says of adapters, by level, and that it says nothing where nobody listens."""

import logging
import re
import subprocess
import sys

import pytest

from minivllm import LoRARequest
from tests.worlds.engines import greedy, run

PROMPT = [5, 6, 7, 8, 9]


def said(caplog, level):
    """Messages of one level, without the seconds, which differ."""
    of_level = [record for record in caplog.records if record.levelno == level]
    assert all(record.name.startswith("minivllm.") for record in of_level)
    return [re.sub(r" in \d+\.\d{3} s$", "", record.getMessage()) for record in of_level]


def test_at_info_what_somebody_asked_for_is_said_with_name_and_id(world, caplog, tmp_path):
    engine = world.engine(max_loras=2)
    qv = world.request("qv")
    caplog.set_level(logging.INFO, "minivllm")

    engine.add_lora(qv)
    engine.pin_lora(qv.lora_int_id)
    engine.unpin_lora(qv.lora_int_id)
    engine.add_lora(world.request("qv", load_inplace=True))
    engine.remove_lora(qv.lora_int_id)
    with pytest.raises(FileNotFoundError):
        engine.add_lora(LoRARequest("gone", 77, str(tmp_path / "nothing")))
    engine.add_lora(qv)
    with pytest.raises(ValueError, match="belongs to"):
        engine.add_lora(LoRARequest("qv", 78, str(tmp_path)))

    name = f"adapter 'qv' (id {qv.lora_int_id})"
    first, second = said(caplog, logging.INFO)[:5], said(caplog, logging.INFO)[5:]
    assert first == [
        f"{name} was read",
        f"{name} is pinned in slot 0",
        f"{name} is pinned no longer",
        f"{name} was read again",
        f"{name} was unloaded",
    ]
    assert second[0].startswith("adapter '77' (id 77) is refused: adapter 'gone': ")
    assert second[1] == f"{name} was read"
    assert second[2].startswith("adapter '78' (id 78) is refused: adapter name 'qv' belongs to")
    assert said(caplog, logging.DEBUG) == []


def test_at_debug_every_move_is_said_with_slot_and_reason(world, caplog):
    engine = world.engine(max_loras=1, max_cpu_loras=1, max_lora_wait_steps=2)
    qv, mlp = world.request("qv"), world.request("mlp")
    caplog.set_level(logging.DEBUG, "minivllm")

    engine.add_request("first", PROMPT, greedy(9), lora_request=qv)
    engine.add_request("second", PROMPT, greedy(2), lora_request=mlp)
    run(engine)

    told = said(caplog, logging.DEBUG)
    name, other = f"adapter 'qv' (id {qv.lora_int_id})", f"adapter 'mlp' (id {mlp.lora_int_id})"
    assert told[:2] == [f"{name} came into slot 0", f"request 'second' of {other} is passed over: max_loras"]
    assert f"request 'first' of {name} was preempted: its slot is needed" in told
    evicted = told.index(f"{name} lost slot 0 to another adapter")
    assert told[evicted + 1 : evicted + 3] == [
        f"{name} left memory for another adapter",
        f"{other} came into slot 0",
    ]


def test_a_step_says_which_requests_ran_out_of_blocks(world, caplog):
    engine = world.engine(num_kv_blocks=6, block_size=4, max_model_len=20)
    caplog.set_level(logging.DEBUG, "minivllm")

    for request_id in ("a", "b"):
        engine.add_request(request_id, PROMPT, greedy(12))
    run(engine)

    assert "request 'b' of the base model was preempted: no KV blocks are left" in said(caplog, logging.DEBUG)


def test_below_the_level_nothing_is_put_into_words(world, monkeypatch):
    from minivllm.observe import event_log, recorder

    class Unworded(dict):
        def get(self, kind, default):
            level, sentence = super().get(kind, default)
            return level, sentence and _Unformatted(sentence)

    monkeypatch.setattr(event_log, "SENTENCES", Unworded(event_log.SENTENCES))
    monkeypatch.setattr(recorder, "_log_request", None)
    engine = world.engine(max_loras=1)

    for name in ("qv", "mlp"):
        engine.add_request(name, PROMPT, greedy(2), lora_request=world.request(name))

    assert {output.error for output in run(engine).values()} == {None}


class _Unformatted(str):
    def format(self, *args, **fields):
        raise AssertionError("nobody listens, and a sentence is made")


def test_a_program_that_does_not_listen_hears_nothing():
    code = "import minivllm.errors as f; f.logger.warning('said to nobody')"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert (result.stdout, result.stderr) == ("", "")


ASKED = """
import logging
import minivllm
{asked}
logging.getLogger("minivllm.lora.events").debug("heard")
logging.getLogger("minivllm.engine").info("also heard")
"""


@pytest.mark.parametrize(
    ("asked", "heard"),
    [
        ('logging.getLogger("minivllm.lora").setLevel(logging.DEBUG)', "heard\n"),
        (
            'logging.basicConfig(level="DEBUG", format="by the program: %(message)s")',
            "by the program: heard\n",
        ),
    ],
    ids=["adapters", "a handler of the program's own"],
)
def test_a_program_that_sets_a_level_hears_it_without_more(asked, heard):
    code = ASKED.format(asked=asked)

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr

    assert said.startswith(heard) and said.count("heard") == (
        2 if "basicConfig" in asked else heard.count("heard")
    )
