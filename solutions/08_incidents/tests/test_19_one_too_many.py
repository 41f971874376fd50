"""Hunt 8.19. A step by hand, in which one of two running requests gets no tokens."""

from tests.worlds.hunts import make_request, make_scheduler


def test_who_runs_without_tokens_in_a_step_keeps_its_slot():
    scheduler = make_scheduler(max_loras=2, max_num_batched_tokens=2)
    for adapter_id in (1, 2):
        scheduler.add_request(make_request(str(adapter_id), adapter_id, prompt=[5], max_tokens=9))

    def commit(output):
        """Two tokens for each that samples, as a step that guesses ahead would give."""
        sampled = {s.request.request_id: [7, 7] for s in output.scheduled if s.samples}
        scheduler.update_from_output(output, sampled)

    commit(scheduler.schedule())
    second = scheduler.schedule()
    assert len(second.scheduled) == 1 and len(second.running) == 2
    commit(second)
    scheduler.pinned_adapters.add(3)

    output = scheduler.schedule()

    assert len({request.adapter_id for request in output.running} | {3}) <= 2
