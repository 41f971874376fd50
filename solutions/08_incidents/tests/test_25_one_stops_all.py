"""Hunt 8.25. One request with a temperature that no tensor holds, beside another."""

from minivllm import SamplingParams
from tests.worlds.hunts import PROMPT, greedy, run, tokens_of

pytest_plugins = "tests.worlds.hunts"


def test_one_requests_number_is_nobody_elses_trouble(world):
    engine = world.engine()
    engine.add_request("hot", PROMPT, SamplingParams(temperature=2**64, max_tokens=3, ignore_eos=True))
    engine.add_request("cool", PROMPT, greedy(3))

    outputs = run(engine)

    assert tokens_of(outputs["cool"]) == world.answer(None, max_tokens=3)
