"""Adapters that add tokens: each request reads and writes its own adapter's, as a model would that always had them."""

import math
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import SamplingParams
from minivllm.gpu.slot_writer import SlotWriter
from tests.worlds.engines import crossed, greedy, made_once, run, snapshot, tokens_of
from tests.worlds.models import character_tokenizer
from tests.worlds.settings import BACKENDS, EACH_BACKEND, OF_OPTIONS
from tests.worlds.tokens import COUNTS, H, TokenSet, V, with_new

EXTRA = 4  # more than any adapter adds
VARIANTS = ["llama-llama3-rope", "qwen2-tied"]
made = partial(made_once, TokenSet)


@pytest.fixture(params=VARIANTS)
def world(request, tmp_path_factory):
    return made(tmp_path_factory, request.param)


@pytest.fixture
def llama(tmp_path_factory):
    return made(tmp_path_factory)


@pytest.fixture
def folder(llama, tmp_path):
    """A copy of adapter "cats" to change."""
    return shutil.copytree(llama.path("cats"), tmp_path / "copy")


def make_engine(world, tokenizer=None, **options):
    return world.engine(tokenizer, **{"lora_extra_vocab_size": EXTRA, "max_cpu_loras": 6, **options})


def tokenizer_with(*tokens):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([*tokens])
    return tokenizer


def edit(folder, **changes):
    """Tensors put into the file of new embeddings; None takes one out."""
    path = folder / "new_embeddings.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


class TestTokens:
    @pytest.mark.parametrize(("variant", "setting"), crossed(VARIANTS, OF_OPTIONS))
    def test_are_those_of_each_request_alone_on_a_model_that_had_them_from_the_start(
        self, tmp_path_factory, variant, setting
    ):
        world = made(tmp_path_factory, variant)
        engine = make_engine(world, **OF_OPTIONS[setting])

        world.assert_serves(engine, world.workload())

    @pytest.mark.parametrize("backend", EACH_BACKEND)
    def test_are_the_same_on_every_backend(self, llama, backend):
        engine = make_engine(llama, max_loras=6, punica_backend=backend)

        llama.assert_serves(engine, llama.workload(1, rows=2), max_tokens=4, tolerance=BACKENDS[backend])

    def test_that_are_added_are_really_produced_and_read_again(self, world):
        """The runs above are worth something only if this happened in them."""
        said = dict.fromkeys([None, *world.names], 0)
        for name, prompt in world.workload():
            answer = world.answer(name, prompt, 8)
            said[name] += sum(token >= V for token in answer[:-1])

        may_speak = [name for name, count in COUNTS.items() if count and name != "reads"]
        assert all(said[name] > 0 for name in may_speak), said
        assert said[None] == said["plain"] == 0

    def test_of_two_adapters_with_the_same_ids_are_each_its_own(self, world):
        prompt = [V, 5, V + 1, 9, V]
        engine = make_engine(world, max_loras=2)

        world.assert_serves(engine, [("cats", prompt), ("dogs", prompt), ("cats", prompt)])
        world.assert_serves(engine, [("dogs", prompt), ("cats", prompt)])  # from the prefix cache

        answers = {tuple(world.answer(name, prompt, 8)) for name in ("cats", "dogs")}
        assert len(answers) == 2

    def test_of_the_last_adapter_in_a_slot_are_gone(self, llama):
        world, engine = llama, make_engine(llama, max_loras=1)

        for name in ["dogs", "cats", "plain", "dogs", "reads", "wide ends", "plain", None, "cats"]:
            prompt = with_new([5, 9, 5, 3], COUNTS[name], 0) if COUNTS.get(name) else [5, 9, 5, 3]
            world.assert_serves(engine, [(name, prompt), (None, [5, 9, 5, 3])])

    def test_are_in_slots_that_a_gpus_writer_fills(self, llama):
        world, engine = llama, make_engine(llama, max_loras=1)
        manager = engine.adapters.manager
        manager.slot_writer = SlotWriter(manager.wrapped, "cpu")

        for name in ["dogs", "cats", "plain", "wide ends", "reads", "plain", "narrow ends"]:
            prompt = with_new([5, 9, 5, 3], COUNTS[name], 0) if COUNTS[name] else [5, 9, 5, 3]
            world.assert_serves(engine, [(name, prompt), (None, [5, 9, 5, 3])], max_tokens=3)

    def test_come_with_an_adapter_in_torchs_own_format_too(self, llama, folder):
        tensors = load_file(folder / "new_embeddings.safetensors")
        (folder / "new_embeddings.safetensors").unlink()
        torch.save(tensors, folder / "new_embeddings.bin")
        engine = make_engine(llama)

        prompt = [V, 5, V + 1]
        engine.add_request("a", prompt, greedy(6), lora_request=llama.request("cats", lora_path=str(folder)))

        assert tokens_of(run(engine)["a"]) == llama.answer("cats", prompt, 6)

    def test_of_an_adapter_that_is_read_again_are_the_new_ones(self, llama, folder):
        """Fewer than before, and others."""
        engine = make_engine(llama)
        cats = llama.request("cats", lora_path=str(folder))
        engine.add_request("old", [V + 1, 5], greedy(6), lora_request=cats)
        engine.step()

        edit(folder, **{name: tensor[1:] for name, tensor in llama.new["cats"].items()})
        again = llama.request("cats", lora_path=str(folder), load_inplace=True)
        engine.add_request("new", [V, 5], greedy(6), lora_request=again)
        with pytest.raises(ValueError, match=r"prompt token ids \[98\]; use ints from 0 to 97"):
            engine.add_request("too far", [V + 1, 5], greedy(6), lora_request=cats)
        outputs = run(engine)

        assert tokens_of(outputs["old"]) == llama.answer("cats", [V + 1, 5], 6)
        # What was token V + 1 is token V now, and there is no other.
        first, *_ = tokens_of(outputs["new"])
        logits = llama.oracle_of("cats").logits("cats", [[V + 1, 5]])[0, -1]
        moved = torch.cat([logits[:V], logits[V + 1 :]])
        assert first == int(moved.argmax())


class TestSampling:
    def test_a_base_rows_draws_do_not_depend_on_its_neighbours_tokens(self, llama):
        params = {"temperature": 1.3, "seed": 7, "max_tokens": 12, "ignore_eos": True}
        alone, mixed = make_engine(llama), make_engine(llama)
        for engine in (alone, mixed):
            engine.add_request("base", [5, 9], SamplingParams(**params))
        mixed.add_request("cats", [5, 9], SamplingParams(**params), lora_request=llama.request("cats"))

        expected, got = run(alone)["base"], run(mixed)

        assert tokens_of(got["base"]) == tokens_of(expected)
        assert tokens_of(got["cats"]) != tokens_of(expected)

    @pytest.mark.parametrize(
        "filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": V + EXTRA}, {}], ids=str
    )
    def test_nobody_draws_a_token_that_its_adapter_does_not_add(self, llama, filters):
        engine = make_engine(llama, max_loras=4)
        names = [None, "cats", "dogs", "plain"]
        for seed in range(6):
            for name in names:
                params = SamplingParams(temperature=4.0, seed=seed, max_tokens=12, ignore_eos=True, **filters)
                request = llama.request(name)
                engine.add_request(f"{name} {seed}", [5, 9], params, lora_request=request)

        outputs = run(engine)

        for request_id, output in outputs.items():
            name = request_id.rpartition(" ")[0]
            assert max(tokens_of(output)) < V + COUNTS.get(name, 0), request_id
        said = {token for output in outputs.values() for token in tokens_of(output) if token >= V}
        assert said >= {V, V + 1}

    def test_logprobs_are_those_of_the_grown_model(self, world):
        engine = make_engine(world)
        prompt = [5, V, 9]
        engine.add_request("a", prompt, greedy(4, logprobs=V + 3), lora_request=world.request("dogs"))
        engine.add_request("base", [5, 9], greedy(4, logprobs=V))
        outputs = run(engine)

        for request_id, name, text, size in (("a", "dogs", prompt, V + 3), ("base", None, [5, 9], V)):
            tokens = tokens_of(outputs[request_id])
            logits = world.oracle_of(name).logits(name, [text + tokens])[0, len(text) - 1 : -1]
            expected = logits.log_softmax(dim=-1)
            for row, found in zip(expected, outputs[request_id].outputs[0].logprobs, strict=True):
                assert sorted(found) == list(range(size))
                for token, logprob in found.items():
                    assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-8)
                    assert logprob.rank == 1 + int((row > row[token] + 1e-9).sum())

    def test_a_bias_or_a_penalty_reaches_the_tokens_that_the_adapter_adds(self, llama):
        engine, prompt = make_engine(llama), [5, 9]
        lora_request = llama.request("dogs")
        engine.add_request("a", prompt, greedy(4, logit_bias={V + 2: 100.0}), lora_request=lora_request)
        params = greedy(4, logit_bias={V + 1: 100.0}, repetition_penalty=1e6)
        engine.add_request("b", prompt, params, lora_request=lora_request)
        engine.add_request("base", prompt, greedy(4, presence_penalty=0.01))

        outputs = run(engine)

        assert tokens_of(outputs["a"]) == [V + 2] * 4
        assert tokens_of(outputs["b"]).count(V + 1) == 1
        assert max(tokens_of(outputs["base"])) < V

    def test_an_added_token_may_end_a_request(self, llama):
        name, prompt = "dogs", [5, 9, V]
        answer = llama.answer(name, prompt, 8)
        end = next(token for token in answer if token >= V)
        engine = make_engine(llama)
        lora_request = llama.request(name)

        engine.add_request("a", prompt, greedy(8, stop_token_ids=[end]), lora_request=lora_request)
        late = greedy(8, stop_token_ids=[end], min_tokens=8)
        engine.add_request("b", prompt, late, lora_request=lora_request)
        outputs = run(engine)

        assert tokens_of(outputs["a"]) == answer[: answer.index(end) + 1]
        assert outputs["a"].outputs[0].finish_reason == "stop"
        assert end not in tokens_of(outputs["b"])[:-1]

    @pytest.mark.parametrize(
        ("name", "params", "message"),
        [
            (None, {"stop_token_ids": [V]}, r"stop_token_ids \[97\]"),
            ("cats", {"stop_token_ids": [V + 1, V + 2]}, r"stop_token_ids \[99\].*0 to 98"),
            (None, {"logprobs": V + 1}, "only 97 tokens"),
            ("cats", {"logprobs": V + 3}, "only 99 tokens"),
            (None, {"logit_bias": {V: 1.0}}, r"logit_bias \[97\]"),
            ("cats", {"logit_bias": {V + 1: 1.0, V + 2: 1.0}}, r"logit_bias \[99\].*0 to 98"),
        ],
        ids=str,
    )
    def test_parameters_are_checked_by_the_adapters_vocabulary(self, llama, name, params, message):
        engine = make_engine(llama)

        with pytest.raises(ValueError, match=message):
            engine.add_request("a", [3], greedy(2, **params), lora_request=llama.request(name))

    @pytest.mark.parametrize(
        "params",
        [{"stop_token_ids": [V], "min_tokens": 2}, {"logprobs": V + 1}, {"logit_bias": {V: 100.0}}],
        ids=str,
    )
    def test_parameters_may_name_tokens_that_are_only_read(self, llama, params):
        """Without `lm_head` among the engine's modules there are no logits for them."""
        engine = make_engine(llama, target_modules=["embed_tokens", "q_proj", "v_proj"])
        engine.add_request("base", [5, 9], greedy(3))
        engine.add_request("a", [5, V], greedy(3, **params), lora_request=llama.request("reads"))

        outputs = run(engine)

        assert tokens_of(outputs["a"]) == llama.answer("reads", [5, V], 3)
        assert tokens_of(outputs["base"]) == llama.answer(None, [5, 9], 3)

    def test_logprobs_of_a_prompt_say_that_a_token_that_is_only_read_cannot_come(self, llama):
        engine = make_engine(llama, target_modules=["embed_tokens", "q_proj", "v_proj"])
        engine.add_request("a", [5, V, 9], greedy(3, prompt_logprobs=1), lora_request=llama.request("reads"))

        output = run(engine)["a"]

        _, of_new, of_9 = output.prompt_logprobs
        assert tokens_of(output) == llama.answer("reads", [5, V, 9], 3)
        assert of_new[V].logprob == -math.inf and of_new[V].rank == V + 1
        assert of_9[9].logprob > -math.inf


class TestPrompts:
    @pytest.mark.parametrize(
        ("name", "token", "message"),
        [
            (None, V, r"prompt token ids \[97\]; use ints from 0 to 96$"),
            ("cats", V + 2, r"prompt token ids \[99\].*0 to 98 \(adapter 'cats' adds 2 tokens\)"),
            ("plain", V, r"prompt token ids \[97\].*0 to 96 \(adapter 'plain' adds 0 tokens\)"),
            ("dogs", V + 3, r"prompt token ids \[100\].*adapter 'dogs' adds 3 tokens"),
        ],
    )
    def test_with_tokens_of_somebody_else_are_refused(self, llama, name, token, message):
        engine = make_engine(llama)
        for other in ("dogs", "cats"):
            engine.add_request(other, [5, V + 1], greedy(3), lora_request=llama.request(other))
        before = snapshot(engine)

        with pytest.raises(ValueError, match=message):
            engine.add_request("a", [3, token], greedy(2), lora_request=llama.request(name))

        assert snapshot(engine) == before

    def test_are_read_by_the_adapters_own_tokenizer(self, llama, folder):
        """And its answers are written by it; other requests, by the model's."""
        own = tokenizer_with("[cat]", "[mew]")
        own.save_pretrained(folder)
        engine = make_engine(llama, character_tokenizer())
        cats = llama.request("cats", lora_path=str(folder))
        text = "a[cat]b[mew]"
        ids = own(text)["input_ids"]
        assert ids == [68, V, 69, V + 1]

        engine.add_request("cats", text, greedy(10, logprobs=2), lora_request=cats)
        engine.add_request("base", text, greedy(10))
        engine.add_request("dogs", [V, 5], greedy(10, logprobs=2), lora_request=llama.request("dogs"))
        outputs = run(engine)

        answer = llama.answer("cats", ids, 10)
        assert engine.get_tokenizer(cats)(text)["input_ids"] == outputs["cats"].prompt_token_ids == ids
        assert tokens_of(outputs["cats"]) == answer
        assert any(token >= V for token in answer)
        assert outputs["cats"].outputs[0].text == own.decode(answer, skip_special_tokens=True)
        for found in outputs["cats"].outputs[0].logprobs:
            assert all(found[t].decoded_token == own.decode([t]) for t in found)
        assert outputs["base"].prompt_token_ids == character_tokenizer()(text)["input_ids"]
        # Without a tokenizer of its own an adapter's tokens have no text.
        dogs = llama.answer("dogs", [V, 5], 10)
        known = [token for token in dogs if token < V]
        assert len(known) < len(dogs)
        assert outputs["dogs"].outputs[0].text == character_tokenizer().decode(known)
        assert any(
            found[t].decoded_token == "" for found in outputs["dogs"].outputs[0].logprobs for t in found
        )

    def test_are_read_by_a_tokenizer_that_is_read_once_a_load(self, llama, folder, monkeypatch):
        from transformers import AutoTokenizer

        reads = []
        load = AutoTokenizer.from_pretrained
        monkeypatch.setattr(
            AutoTokenizer,
            "from_pretrained",
            lambda *args, **kwargs: reads.append(args) or load(*args, **kwargs),
        )
        tokenizer_with("[cat]", "[mew]").save_pretrained(folder)
        engine = make_engine(llama, character_tokenizer())
        cats = llama.request("cats", lora_path=str(folder))

        for i in range(3):
            engine.add_request(str(i), "a[mew]", greedy(2), lora_request=cats)
        run(engine)
        assert len(reads) == 1
        tokenizer_with("[miaow]", "[purr]").save_pretrained(folder)
        again = llama.request("cats", lora_path=str(folder), load_inplace=True)
        engine.add_request("again", "a[purr]", greedy(2), lora_request=again)
        engine.add_request("once more", "a[purr]", greedy(2), lora_request=cats)
        outputs = run(engine)

        assert len(reads) == 2
        assert outputs["again"].prompt_token_ids == outputs["once more"].prompt_token_ids == [68, V + 1]

        engine.remove_lora(1)
        shutil.copy(llama.path("cats") / "adapter_config.json", folder)
        (folder / "tokenizer.json").unlink()
        engine.add_request("plain text", "a[cat]", greedy(2), lora_request=cats)
        assert max(run(engine)["plain text"].prompt_token_ids) < V

    def test_of_an_adapter_whose_tokenizer_is_damaged_are_refused(self, llama, folder):
        (folder / "tokenizer.json").write_text('{"model":')
        engine = make_engine(llama, character_tokenizer())
        before = snapshot(engine)

        with pytest.raises(ValueError, match=r"adapter 'cats': the tokenizer in .* cannot be read"):
            engine.add_request("a", "a", greedy(2), lora_request=llama.request("cats", lora_path=str(folder)))

        assert snapshot(engine) == before

    def test_a_tokenizer_of_an_adapter_that_adds_no_tokens_is_not_read(self, llama, tmp_path):
        """Trainers put the base model's beside every adapter."""
        folder = shutil.copytree(llama.path("plain"), tmp_path / "plain")
        (folder / "tokenizer.json").write_text('{"model":')
        engine = make_engine(llama, character_tokenizer())

        plain = llama.request("plain", lora_path=str(folder))
        engine.add_request("a", "a", greedy(2), lora_request=plain)

        assert len(tokens_of(run(engine)["a"])) == 2

    def test_of_a_chat_go_through_the_adapters_own_template(self, llama, folder):
        own = tokenizer_with("[cat]", "[mew]")
        own.chat_template = "[mew]{{ messages[0]['content'] }}"
        own.save_pretrained(folder)
        llm = llama.llm(lora_extra_vocab_size=EXTRA)
        llm.get_tokenizer().chat_template = "{{ messages[0]['content'] }}:"
        conversations = [[{"role": "user", "content": "a[cat]"}]] * 2
        cats = llama.request("cats", lora_path=str(folder))

        base, mine = llm.chat(conversations, greedy(2), use_tqdm=False, lora_request=[None, cats])

        assert base.prompt == "a[cat]:"
        assert (mine.prompt, mine.prompt_token_ids) == ("[mew]a[cat]", [V + 1, 68, V])

    @pytest.mark.parametrize("template", ["{% for", "{{ raise_exception('no such role') }}", "{{ 1 + 'a' }}"])
    def test_of_a_chat_that_the_adapters_own_template_cannot_take_are_refused(self, llama, folder, template):
        own = character_tokenizer()
        own.chat_template = template
        own.save_pretrained(folder)
        llm = llama.llm(lora_extra_vocab_size=EXTRA)
        llm.get_tokenizer().chat_template = "{{ messages[0]['content'] }}:"
        before = snapshot(llm.llm_engine)
        cats = llama.request("cats", lora_path=str(folder))

        with pytest.raises(ValueError, match="the chat template cannot take this conversation: "):
            llm.chat([[{"role": "user", "content": "a"}]] * 2, greedy(2), lora_request=[None, cats])

        assert snapshot(llm.llm_engine) == before


class TestRefused:
    """Before anything changes, with what to do about it."""

    def refusal(self, world, name, engine=None, **request):
        engine = engine or make_engine(world)
        before = snapshot(engine)
        with pytest.raises(ValueError) as caught:
            engine.add_request("a", [3], greedy(2), lora_request=world.request(name, **request))
        assert snapshot(engine) == before
        return str(caught.value)

    @pytest.mark.parametrize("extra", [0, 2])
    def test_more_tokens_than_there_is_room_for(self, llama, extra):
        text = self.refusal(llama, "dogs", make_engine(llama, lora_extra_vocab_size=extra))

        assert text == (
            f"adapter 'dogs': the adapter adds 3 tokens, but lora_extra_vocab_size is {extra}; "
            "pass --lora-extra-vocab-size 3"
        )

    @pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "v_proj", "embed_tokens"]])
    def test_an_engine_that_leaves_an_end_out(self, llama, targets):
        text = self.refusal(llama, "cats", make_engine(llama, target_modules=targets))

        assert "target_modules leave out the module of their" in text

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"input_embeddings": torch.ones(2, 47)}, "shape (2, 47), but the model's hidden size is 48"),
            ({"output_embeddings": torch.ones(2, 47)}, "shape (2, 47), but the model's hidden size is 48"),
            ({"output_embeddings": torch.ones(1, H)}, "has 2 input_embeddings but 1 output_embeddings"),
            ({"input_embeddings": torch.ones(2)}, "must be floats of shape (tokens, hidden size), got (2,)"),
            ({"input_embeddings": torch.ones(2, H).int()}, "must be floats"),
            ({"input_embeddings": torch.ones(0, H)}, "must be floats of shape (tokens, hidden size), got (0"),
            ({"input_embeddings": None}, "has no input_embeddings"),
            ({"position_embeddings": torch.ones(2, H)}, "holds position_embeddings; only"),
        ],
        ids=lambda value: None if isinstance(value, str) else " ".join(value),
    )
    def test_embeddings_that_do_not_fit(self, llama, folder, changes, message):
        edit(folder, **changes)

        assert message in self.refusal(llama, "cats", lora_path=str(folder))

    def test_a_file_that_is_damaged(self, llama, folder):
        (folder / "new_embeddings.safetensors").write_bytes(b"not this")

        text = self.refusal(llama, "cats", lora_path=str(folder))

        assert "new_embeddings.safetensors' is not a readable safetensors file" in text

    @pytest.mark.parametrize(
        ("name", "value"), [("input_embeddings", math.nan), ("output_embeddings", -math.inf)]
    )
    def test_numbers_that_are_none(self, llama, folder, name, value):
        tensor = llama.new["cats"][name].clone()
        tensor[1, 5] = value
        edit(folder, **{name: tensor})
        engine = make_engine(llama)

        with pytest.raises(ValueError, match=f"{name} of the added tokens hold NaN or Inf"):
            engine.add_lora(llama.request("cats", lora_path=str(folder)))

        llama.assert_serves(engine, [("dogs", [V + 2, 5])])

    @pytest.mark.parametrize(
        ("end", "shape", "adds_tokens", "message"),
        [
            *[
                ("lora_embedding_A", (4, width), True, f"embed_tokens has lora_A (4, {width})")
                for width in (V - 1, V + 1, V + 3)
            ],
            ("lora_embedding_A", (4, V + 1), True, "but the vocabulary has 97 or 99 tokens"),
            ("lm_head.lora_B.weight", (V - 1, 4), False, "lora_B (96, 4), but the vocabulary has 97 tokens"),
            ("lm_head.lora_B.weight", (V + 2, 4), False, "lora_B (99, 4), but the vocabulary has 97 tokens"),
            # Only what is a matter of tokens is filled up.
            ("lora_embedding_B", (H - 1, 4), True, "lora_B (47, 4)"),
        ],
    )
    def test_a_or_b_for_other_tokens_than_are_added(self, llama, tmp_path, end, shape, adds_tokens, message):
        folder = shutil.copytree(llama.path("narrow ends"), tmp_path / "ends")
        if not adds_tokens:
            (folder / "new_embeddings.safetensors").unlink()
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith(end))
        save_file({**tensors, name: torch.ones(shape, dtype=torch.float64)}, path)

        assert message in self.refusal(llama, "narrow ends", lora_path=str(folder))

    def test_an_a_for_more_tokens_from_an_adapter_that_adds_none(self, llama, tmp_path):
        folder = shutil.copytree(llama.path("wide ends"), tmp_path / "ends")
        (folder / "new_embeddings.safetensors").unlink()

        assert "vocabulary has 97 tokens" in self.refusal(llama, "wide ends", lora_path=str(folder))
