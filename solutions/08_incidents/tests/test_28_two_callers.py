"""Hunt 8.28. A second thread asks in the middle of a step."""

from tests.worlds.hunts import PROMPT, greedy, in_a_thread, run, tokens_of

pytest_plugins = "tests.worlds.hunts"


def test_a_second_thread_takes_nothing_from_the_first(world, monkeypatch):
    engine, mine = world.engine(), world.adapter(1)
    engine.add_request("first", PROMPT, greedy(4))
    launch, answers = engine.runner.launch_model, []

    def launched(scheduled):
        if not answers:
            answers.append("asked")
            answers.append(in_a_thread(lambda: world.ask(engine, mine)))
        return launch(scheduled)

    monkeypatch.setattr(engine.runner, "launch_model", launched)
    outputs = run(engine)

    assert tokens_of(outputs["first"]) == world.answer(None, max_tokens=4)
    assert isinstance(answers[1], RuntimeError) or answers[1] == world.answer(mine)
