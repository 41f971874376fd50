"""Which adapters may be read ahead of the steps, and what a request is told that waits for one."""

from types import SimpleNamespace

import pytest

from minivllm.serving.read_policy import LOADING, ReadPolicy


class Reads(dict):
    """Adapter id -> whether it has been read. unwanted: ids that no request waits for any more"""

    def __init__(self, held, unwanted=()):
        super().__init__(held)
        self.held, self.unwanted = self, unwanted

    def forget_unwanted(self):
        for adapter_id in self.unwanted:
            del self[adapter_id]


def policy_of_one_read(reads, running=()):
    return ReadPolicy(reads, 1, SimpleNamespace(running=list(running)))


def test_an_adapter_that_nobody_waits_for_any_more_holds_up_no_other():
    reads = Reads({1: True}, unwanted=[1])

    answer = policy_of_one_read(reads).begin_or_wait(2, lambda: reads.update({2: False}))

    assert answer == LOADING
    assert reads == {2: False}


OTHER = SimpleNamespace(adapter_id=0)


@pytest.mark.parametrize(
    ("is_read", "running", "answer"),
    [(False, [], LOADING), (True, [OTHER], LOADING), (True, [], None)],
    ids=["that is being read", "while others run", "that waits for a slot in an empty step"],
)
def test_no_second_adapter_is_read_beside_one(is_read, running, answer):
    """Where nothing else can come, the step reads the second one itself: waiting would have no end."""
    policy = policy_of_one_read(Reads({1: is_read}), running)

    assert policy.begin_or_wait(2, begin=lambda: pytest.fail("it was begun")) == answer
