"""Hunt 8.31: neither the old adapter nor the new one."""

from tests.worlds.hunts import PROMPT, greedy, run, tokens_of

pytest_plugins = "tests.worlds.hunts"


def test_what_follows_a_restart_is_what_the_new_weights_alone_say(world):
    engine, new = world.engine(), world.adapter(8)
    engine.add_request("r", PROMPT, greedy(8), lora_request=world.adapter(7))
    for _ in range(3):
        engine.step()

    engine.update_lora("adapter7", new.lora_path, running="restart")
    tokens = tokens_of(run(engine)["r"])

    assert tokens[3:] == world.answer(new, PROMPT + tokens[:3], 5)
