"""Hunt 8.25. One request with a temperature that no tensor holds, beside another."""

from hunting import PROMPT, greedy, run, tokens_of

from minivllm import SamplingParams

pytest_plugins = "hunt_world"


def test_one_requests_number_is_nobody_elses_trouble(world):
    engine = world.engine()
    engine.add_request("hot", PROMPT, SamplingParams(temperature=2**64, max_tokens=3, ignore_eos=True))
    engine.add_request("cool", PROMPT, greedy(3))

    outputs = run(engine)

    assert tokens_of(outputs["cool"]) == world.answer(None, max_tokens=3)
