"""Answers that use what the engine's own objects have, beyond what our code asks of them, are right.

A test that gives a learner's code a stand-in with less refuses them: the tests' objects are real, or have as much.
"""

import pytest
from checkout import judged

from labs.kit.forks import Job
from labs.kit.overlay import Source
from labs.kit.regions import edit, read_engine

pytestmark = pytest.mark.nightly

# Exercise -> lines of ours, and others that say the same.
ANSWERS = {
    "7.2": ("self._manager().set_active_adapters(", "(self.model and self._manager()).set_active_adapters("),
    "7.3": (
        "hidden_states = self.model(input_ids, positions, attn)",
        "hidden_states = self.model.forward(input_ids, positions, attn)",
    ),
    "7.5 memory": (
        "if adapter.id not in self.manager.list_adapters():",
        "if self.manager.get_adapter(adapter.id) is None or adapter.id not in self.worker.list_adapters():",
    ),
    "7.5 requests": (
        "generations = self.queues.in_flight.get(adapter.id, ())",
        "requests = [r for r in self.queues.requests.values() if r.adapter_id == adapter.id]\n"
        "        generations = [r.adapter_generation for r in requests if not r.status.is_finished]",
    ),
    "9.3": (
        "if not finished:\n            client.abort",
        "if not finished and client.error is None:\n            client.abort",
    ),
    "9.4": (
        "if not self.is_known(name):",
        "if not self.is_known(name) and stable_id(name) not in await self.llm.list_loras():",
    ),
    "10.1": ("if replica.output is not None:", "if replica.output is not None and replica.served:"),
    "10.3 who runs": ("if request not in waiting:", "if request in scheduler.running:"),
    "10.3 who has finished": ("if request.is_finished:", "if request.status.is_finished:"),
    "10.4": ("islice(waiting.queue, self.most)", "islice(waiting.queue.requests.values(), self.most)"),
}


@pytest.fixture(scope="module")
def said():
    """Answer -> what is said against it."""
    jobs = []
    for name, lines in ANSWERS.items():
        exercise = read_engine()[name.split()[0]]
        sources = {exercise.module: Source(name, edit(exercise, [lines]))}
        jobs.append(Job(name, exercise.number, sources, stop_at_first=True))
    return {
        job.key: "" if outcome.passed else outcome.trouble or outcome.of("failed")[0]
        for job, outcome in judged(jobs)
    }


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_may_use_what_the_engine_has(said, name):
    assert said[name] == ""
