"""One LLM for several threads: each gets its own answers, all in one batch."""

import os
import signal
import threading

import pytest
from patience import PATIENCE, wait_until
from soak_checks import check_engine
from tiny_engine import greedy, tiny_world, tokens_of

from labs.kit.overlay import Todo

PROMPT = [5, 6, 7, 8, 9]
LONG = 200


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


@pytest.fixture
def llm(world):
    """When the test is over nothing may be left in the engine, and no thread behind it."""
    before = threading.active_count()
    llm = world.llm(max_num_seqs=8)
    yield llm
    wait_until(lambda: threading.active_count() <= before)
    assert llm._shared.driver is None and llm._shared.loop.is_idle
    check_engine(llm.llm_engine, [])


def ask(llm, lora=None, length=12, prompt=PROMPT):
    return llm.generate({"prompt_token_ids": prompt}, greedy(length), use_tqdm=False, lora_request=lora)


class Threads:
    """Calls in threads of their own; `answers` has the result of each, or what it raised."""

    def __init__(self, **calls):
        self.answers = {}
        self.threads = [threading.Thread(target=self._run, args=call) for call in calls.items()]
        for thread in self.threads:
            thread.start()

    def _run(self, name, function):
        try:
            self.answers[name] = function()
        except BaseException as error:
            self.answers[name] = error

    def join(self):
        for thread in self.threads:
            thread.join(PATIENCE)
        return self.answers


def begun(llm, count):
    """Wait until so many requests are in the engine."""
    wait_until(lambda: llm.llm_engine.get_num_unfinished_requests() >= count)


def test_fifteen_callers_of_one_llm_get_their_own_answers(world, llm):
    names = [None, *world.names]
    start = threading.Barrier(15)

    def call(i):
        start.wait()
        return ask(llm, world.request(names[i % 5]), 8 + i)

    answers = Threads(**{str(i): lambda i=i: call(i) for i in range(15)}).join()

    for i in range(15):
        [output] = answers[str(i)]
        assert tokens_of(output) == world.oracle().greedy(names[i % 5], PROMPT, 8 + i)


def before_steps(monkeypatch, llm, function):
    """Before each step that has rows the function is called with their number; what it raises the step raises."""
    runner = llm.llm_engine.runner
    launch = runner.launch_model
    monkeypatch.setattr(
        runner,
        "launch_model",
        lambda scheduled: (function(len(scheduled.scheduled)), launch(scheduled))[1],
    )


def wait_for_another(llm):
    """Another caller has something for the engine to do between two steps."""
    wait_until(lambda: llm._shared.loop.hand_over.waits)


def test_callers_run_in_one_batch(world, llm, monkeypatch):
    seen, came_back = [], threading.Event()

    def look(rows):
        seen.append(rows)
        if len(seen) == 3:  # it has run alone
            wait_for_another(llm)
        if rows < max(seen):
            assert came_back.wait(PATIENCE), "the short one was to come back first"

    before_steps(monkeypatch, llm, look)
    first = Threads(first=lambda: ask(llm, length=LONG))
    wait_until(lambda: len(seen) == 3)

    [second] = ask(llm, world.request("qv"), 20)
    came_back.set()

    assert set(seen) == {1, 2}
    assert tokens_of(first.join()["first"][0]) == world.oracle().greedy(None, PROMPT, LONG)
    assert tokens_of(second) == world.oracle().greedy("qv", PROMPT, 20)


def test_who_is_alone_steps_the_engine_in_its_own_thread(llm, monkeypatch):
    threads, step = set(), llm.llm_engine.step
    monkeypatch.setattr(
        llm.llm_engine, "step", lambda **options: threads.add(threading.get_ident()) or step(**options)
    )

    ask(llm)

    assert threads == {threading.get_ident()}


def test_several_answers_come_back_to_each_of_several_callers(world, llm):
    from minivllm import SamplingParams

    params = SamplingParams(temperature=1.2, seed=5, n=3, max_tokens=40, ignore_eos=True)
    prompts = [{"prompt_token_ids": [*PROMPT, i]} for i in range(3)]

    def call():
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=world.request("qv"))
        return [[answer.token_ids for answer in output.outputs] for output in outputs]

    expected = call()
    answers = Threads(**{str(i): call for i in range(4)}).join()

    assert list(answers.values()) == [expected] * 4


def test_a_refused_call_is_refused_alone(world, llm):
    first = Threads(first=lambda: ask(llm, length=LONG))
    begun(llm, 1)

    with pytest.raises(ValueError, match="empty prompt"):
        llm.generate([{"prompt_token_ids": PROMPT}, {"prompt_token_ids": []}], greedy(9), use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() <= 1

    assert tokens_of(first.join()["first"][0]) == world.oracle().greedy(None, PROMPT, LONG)


def test_texts_and_tokenizers_are_for_all_threads(world, llm):
    first = Threads(first=lambda: ask(llm, length=LONG))
    begun(llm, 1)

    assert llm.get_tokenizer(world.request("qv")).decode([40]) == llm.llm_engine.tokenizer.decode([40])
    assert llm.generate("text", greedy(3), use_tqdm=False)[0].prompt == "text"

    assert tokens_of(first.join()["first"][0]) == world.oracle().greedy(None, PROMPT, LONG)


def test_a_reload_by_one_thread_waits_for_the_others(world, llm):
    first = Threads(first=lambda: ask(llm, world.request("qv"), LONG))
    begun(llm, 1)

    [output] = ask(llm, world.request("qv", load_inplace=True), 9)

    assert tokens_of(output) == world.oracle().greedy("qv", PROMPT, 9)
    assert tokens_of(first.join()["first"][0]) == world.oracle().greedy("qv", PROMPT, LONG)


def test_ctrl_c_ends_the_call_of_the_main_thread_alone(world, llm, monkeypatch):
    interrupts = []

    def interrupt_all_three(rows):
        if rows == 3 and not interrupts:
            interrupts.append(os.kill(os.getpid(), signal.SIGINT))
            wait_for_another(llm)  # it ends its request
        elif not interrupts:
            wait_for_another(llm)  # it begins one

    before_steps(monkeypatch, llm, interrupt_all_three)
    others = Threads(**{str(i): lambda: ask(llm, world.request("qv"), LONG) for i in range(2)})
    begun(llm, 2)

    with pytest.raises(KeyboardInterrupt):
        ask(llm, length=LONG)

    assert llm.llm_engine.get_num_unfinished_requests() <= 2
    for [output] in others.join().values():
        assert tokens_of(output) == world.oracle().greedy("qv", PROMPT, LONG)


def test_ctrl_c_in_the_caller_who_came_first_leaves_the_others_theirs(world, llm, monkeypatch):
    """It comes when others have come already, and nobody but the first could step the engine."""
    launch, others = llm.llm_engine.runner.launch_model, []

    def interrupted(scheduled):
        if not others:
            others.append(Threads(**{str(i): lambda: ask(llm, world.request("qv"), 30) for i in range(2)}))
            wait_until(lambda: llm._shared.loop.hand_over.waits)
            raise KeyboardInterrupt
        return launch(scheduled)

    monkeypatch.setattr(llm.llm_engine.runner, "launch_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(llm, length=LONG)

    for [output] in others[0].join().values():
        assert tokens_of(output) == world.oracle().greedy("qv", PROMPT, 30)


@pytest.mark.parametrize("error", [Todo("7.4", "x"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_what_is_no_fault_of_a_step_is_told_to_all_and_the_next_call_is_served(
    world, llm, monkeypatch, error
):
    raised = []

    def raise_once(rows):
        if rows == 3 and not raised:
            raised.append(True)
            raise error
        if not raised:
            wait_for_another(llm)

    before_steps(monkeypatch, llm, raise_once)
    answers = Threads(**{str(i): lambda: ask(llm, length=LONG) for i in range(3)}).join()

    assert raised and all(isinstance(answer, Exception) for answer in answers.values())
    assert {type(error).__name__ in f"{type(answer).__name__} {answer}" for answer in answers.values()} == {
        True
    }
    assert tokens_of(ask(llm)[0]) == world.oracle().greedy(None, PROMPT, 12)


def test_a_call_in_the_middle_of_another_of_the_same_thread_is_refused(world, llm, monkeypatch):
    launch, refused = llm.llm_engine.runner.launch_model, []

    def launched(scheduled):
        with pytest.raises(RuntimeError, match="in the middle of another call"):
            ask(llm)
        refused.append(True)
        return launch(scheduled)

    monkeypatch.setattr(llm.llm_engine.runner, "launch_model", launched)
    [output] = ask(llm, length=3)

    assert len(refused) == 3 and tokens_of(output) == world.oracle().greedy(None, PROMPT, 3)


def test_somebody_elses_request_is_kept_for_its_caller_while_threads_share_the_engine(world, llm):
    llm.llm_engine.add_request("theirs", PROMPT, greedy(4), lora_request=world.request("qv"))
    first = Threads(**{str(i): lambda: ask(llm, length=LONG) for i in range(2)})
    first.join()

    heard = []
    while llm.llm_engine.has_unfinished_requests():
        heard += llm.llm_engine.step()

    pieces = [token for output in heard for token in output.outputs[0].delta_token_ids]
    assert pieces == tokens_of(heard[-1]) == world.oracle().greedy("qv", PROMPT, 4)
