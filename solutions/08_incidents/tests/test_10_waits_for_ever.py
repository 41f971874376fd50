"""Hunt 8.10. Two adapters whose requests never stop, and a third."""

from tests.worlds.hunts import greedy

pytest_plugins = "tests.worlds.hunts"


def test_a_third_adapter_is_served_while_two_keep_coming(world):
    engine = world.engine(max_loras=2, max_lora_wait_steps=4, max_num_seqs=6)
    loras = {i: world.adapter(i) for i in (1, 2, 3)}
    sent = 0

    def send(adapter_id, max_tokens, request_id=None):
        nonlocal sent
        sent += 1
        engine.add_request(
            request_id or f"{adapter_id} {sent}",
            [5, 6, 7],
            greedy(max_tokens),
            lora_request=loras[adapter_id],
        )

    for adapter_id in (1, 2):
        send(adapter_id, 2)
        send(adapter_id, 5)
    engine.step()
    send(3, 4, "third")
    finished = []
    for _ in range(40):
        finished += [output.request_id for output in engine.step() if output.finished]
        for adapter_id in (1, 2):  # two of each, which never end together
            running = [r for r in engine.scheduler.requests.values() if r.adapter_id == adapter_id]
            if len(running) < 2:
                send(adapter_id, 5)

    assert "third" in finished
