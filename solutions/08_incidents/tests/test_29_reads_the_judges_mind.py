"""Hunt 8.29: the base model has read the judge's mind."""

pytest_plugins = "tests.worlds.hunts"


def test_the_base_model_answers_as_if_the_judge_had_not_been_asked(world):
    engine = world.engine()
    # It begins at the seventh token of the prompt, in the middle of the second block of four.
    judge = world.adapter(7, alora_invocation_tokens=[11], task_type="CAUSAL_LM")
    world.ask(engine, judge)

    tokens = world.ask(engine, None)

    assert tokens == world.answer(None)
