"""Hunt 8.9. An adapter with both patterns."""

pytest_plugins = "tests.worlds.hunts"


def test_a_module_of_a_pattern_has_its_own_rank_and_alpha(world):
    engine = world.engine()
    mine = world.adapter(
        1,
        rank=4,
        alpha=6,
        rank_pattern={"down_proj": 8},
        alpha_pattern={"q_proj": 40},
        modules=("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"),
    )
    alphas = world.adapter(2, alpha_pattern={"q_proj": 40})
    ranks = world.adapter(3, rank_pattern={"down_proj": 1, "v_proj": 8})

    for lora in (mine, alphas, ranks):
        assert world.ask(engine, lora) == world.answer(lora)
