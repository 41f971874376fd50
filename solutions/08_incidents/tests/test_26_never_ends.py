"""Hunt 8.26. A pattern that re would try for years."""

from tests.worlds.hunts import TimeLimit

pytest_plugins = "tests.worlds.hunts"


def test_a_pattern_that_never_ends_is_given_up(world):
    engine = world.engine()
    mine = world.adapter(1, alpha_pattern={r"(\w\w?|\w\w?|\.)+[!?]": 3})

    with TimeLimit(5):
        try:
            engine.add_lora(mine)
        except ValueError as error:
            assert "alpha_pattern" in str(error)
