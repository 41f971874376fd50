"""An engine on several ranks: the tokens of one, refusals by all of them or none, and the end of all with any."""

import asyncio
import gc
from functools import partial

import pytest

from minivllm import AsyncLLM, EngineArgs, LoRARequest, SamplingParams
from minivllm.errors import EngineDeadError, in_one_sentence
from minivllm.parallel import other_ranks, shared_reading
from minivllm.parallel.ranks import config_of, device_of
from minivllm.serving.engine_process import EngineProcess
from tests.tools.forked import forked_processes
from tests.worlds.engines import OPTIONS, greedy, make_engine, tokens_of
from tests.worlds.processes import all_end, dies_in_a_step, group_is_left, kill_rank, rank_pids
from tests.worlds.waiting import PATIENCE

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def engines():
    """Those that live: one, or none after a test that ended it."""
    alive = []
    yield alive
    for llm in alive:
        llm.llm_engine.executor.shutdown()


@pytest.fixture
def shared(world, engines):
    """Of two ranks, with four slots; most tests share one."""
    if not engines:
        options = {"max_loras": 4, "max_cpu_loras": 8, "threads": 1, "skip_tokenizer_init": True}
        with forked_processes():
            engines.append(world.llm(tensor_parallel_size=2, **options))
    return engines[0]


def answers(llm, loras, length=6, prompt=PROMPT):
    outputs = llm.generate(
        [{"prompt_token_ids": prompt}] * len(loras), greedy(length), use_tqdm=False, lora_request=loras
    )
    return [tokens_of(output) for output in outputs]


class TestAnswers:
    def test_of_base_and_all_adapters_have_the_tokens_of_peft(self, world, shared):
        names = [None, *world.names] * 2

        found = answers(shared, [world.request(name) for name in names], 9)

        assert found == [world.oracle().greedy(name, PROMPT, 9) for name in names]

    @pytest.mark.nightly
    def test_behind_an_event_loop_too_where_adapters_are_read_beside_the_steps(self, world):
        """As `minivllm serve` has them."""
        options = {**OPTIONS, "tensor_parallel_size": 2, "threads": 1}
        llm, names = (
            AsyncLLM(EngineProcess(partial(make_engine, world.base, None, options))),
            [None, *world.names],
        )

        async def answer(name):
            return [o async for o in llm.generate(PROMPT, greedy(9), f"of {name}", world.request(name))][-1]

        async def main():
            return await asyncio.gather(*map(answer, names))

        try:
            found = [tokens_of(output) for output in asyncio.run(main())]
        finally:
            llm.shutdown()
        assert found == [world.oracle().greedy(name, PROMPT, 9) for name in names]

    def test_of_40_adapters_over_4_slots_and_8_places_in_memory_too(self, world, shared):
        names = [world.names[i % 4] for i in range(40)]
        loras = [LoRARequest(f"{name}-{i}", 100 + i, str(world.path(name))) for i, name in enumerate(names)]
        expected = {name: world.oracle().greedy(name, PROMPT, 4) for name in world.names}

        found = answers(shared, loras, 4)

        assert found == [expected[name] for name in names]
        gc.collect()
        assert len(shared.llm_engine.executor._reading._number_of) == len(shared.llm_engine.list_loras()) == 8

    def test_that_are_drawn_or_scored_are_those_of_one_rank(self, world, shared):
        params = SamplingParams(temperature=1.2, seed=3, n=2, max_tokens=7, logprobs=2, prompt_logprobs=1)
        prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": [40, 41, 42]}]
        alone = world.llm(skip_tokenizer_init=True).generate(
            prompts, params, use_tqdm=False, lora_request=world.request("mlp")
        )

        outputs = shared.generate(prompts, params, use_tqdm=False, lora_request=world.request("mlp"))

        for found, wanted in zip(outputs, alone):
            assert [a.token_ids for a in found.outputs] == [a.token_ids for a in wanted.outputs]
            for scores, others in zip(found.prompt_logprobs[1:], wanted.prompt_logprobs[1:]):
                assert {t: p.logprob for t, p in scores.items()} == pytest.approx(
                    {t: p.logprob for t, p in others.items()}
                )


class TestAnAdapter:
    def test_that_one_rank_refuses_is_refused_by_all_and_others_are_served(self, world, shared, monkeypatch):
        monkeypatch.setattr(shared_reading, "stamp_of", lambda lora_request: "as it never was")
        engine = shared.llm_engine

        with pytest.raises(
            ValueError, match="adapter 'new' cannot be loaded on rank 1: its files have changed"
        ):
            engine.add_lora(LoRARequest("new", 900, str(world.path("qv"))))
        monkeypatch.undo()

        assert 900 not in engine.list_loras()
        assert answers(shared, [world.request("qv")]) == [world.oracle().greedy("qv", PROMPT, 6)]

    def test_that_is_not_there_or_does_not_fit_is_refused_as_by_one_rank(self, world, shared, tmp_path):
        with pytest.raises(FileNotFoundError, match="adapter 'gone'"):
            shared.llm_engine.add_lora(LoRARequest("gone", 901, str(tmp_path / "nowhere")))

        assert answers(shared, [world.request("all")]) == [world.oracle().greedy("all", PROMPT, 6)]

    def test_that_is_added_by_the_runner_is_the_engines_and_everywhere(self, world, shared):
        engine, mine = shared.llm_engine, LoRARequest("mine", 903, str(world.path("all")))

        assert engine.runner.add_lora(mine) and engine.runner.lora_manager.pin_adapter(903)

        assert answers(shared, ["mine", world.request("qv")]) == [
            world.oracle().greedy(name, PROMPT, 6) for name in ("all", "qv")
        ]
        assert engine.adapters.pinned == {903}
        assert engine.runner.lora_manager.manager.remove_adapter(903) and not engine.has_lora(903)

    def test_that_is_read_again_is_read_again_by_all(self, world, shared, tmp_path):
        engine, folder = shared.llm_engine, tmp_path / "changing"
        folder.symlink_to(world.path("qv"))
        assert answers(shared, [LoRARequest("changing", 902, str(folder))]) == [
            world.oracle().greedy("qv", PROMPT, 6)
        ]
        folder.unlink()
        folder.symlink_to(world.path("all"))

        engine.add_lora(LoRARequest("changing", 902, str(folder), load_inplace=True))

        assert answers(shared, [LoRARequest("changing", 902, str(folder))]) == [
            world.oracle().greedy("all", PROMPT, 6)
        ]


class TestOneProcess:
    def test_has_one_such_engine_at_a_time(self, world, shared):
        with pytest.raises(RuntimeError, match="has a group of torch"):
            world.llm(tensor_parallel_size=2, skip_tokenizer_init=True)

    def test_gives_each_rank_its_share_of_the_cores(self, world, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr("minivllm.parallel.ranks.available_cores", lambda: 9)
        options = {**OPTIONS, "tensor_parallel_size": 4}
        config = EngineArgs(str(world.base), **options).create_engine_config()

        assert [config_of(rank, config).threads for rank in range(4)] == [2] * 4
        assert [device_of(rank, "cuda:2") for rank in range(2)] == ["cuda:2", "cuda:3"]
        assert device_of(1, "cuda") == "cuda:1" and device_of(1, "cpu") == "cpu"


def test_an_error_of_several_lines_that_ended_a_rank_is_one_sentence_of_the_same_kind_in_every_call():
    others = other_ranks.OtherRanks([])
    others._die(1, "CUDA error: misaligned address\nCompile with TORCH_USE_CUDA_DSA\n")

    with pytest.raises(
        EngineDeadError, match=r"rank 1 of 1 has ended \(CUDA error: .*\), and the engine with it"
    ):
        in_one_sentence(others.check)()


class TestTheEndOfARank:
    def test_by_a_signal_ends_every_request_by_name_and_leaves_nothing(
        self, world, shared, engines, monkeypatch
    ):
        engines.clear()  # the next test gets another one
        for seconds in ("SECONDS_TO_HEAR", "SECONDS_TO_STOP"):  # on a busy machine news of it may take long
            monkeypatch.setattr(other_ranks, seconds, PATIENCE)
        engine = shared.llm_engine
        pids = rank_pids(engine)[1:]
        for i in range(3):
            engine.add_request(f"r{i}", {"prompt_token_ids": PROMPT}, greedy(400))
        engine.step()
        kill_rank(engine, 1)

        dies_in_a_step(engine, r"rank 1 of 2 has ended \(killed by signal 9\)")

        for lora_request in (None, world.request("qv")):
            with pytest.raises(EngineDeadError, match="rank 1 of 2"):
                engine.add_request("late", {"prompt_token_ids": PROMPT}, greedy(4), lora_request=lora_request)
            assert not engine.knows("late")
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="rank 1 of 2"):
                answers(shared, [None, world.request("qv")])
        all_end(pids)
        group_is_left()
