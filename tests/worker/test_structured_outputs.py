"""Answers with a given structure, in batches that mix adapters, beside transformers + PEFT and brute force.

The oracle knows no grammars: it looks which tokens of the vocabulary are how a text that is allowed goes on.
"""

import gc
import json
import pickle
import re
from collections import defaultdict

import jsonschema_rs
import pytest
import torch

from minivllm import LLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from minivllm.sampling_params import StructuredOutputsParams
from tests.oracles.peft import Oracle
from tests.tools.nights import by_day
from tests.worlds.ahead import run_ahead
from tests.worlds.demo import NAMES, adapter_folder, demo_base
from tests.worlds.engines import greedy, run, tiny_world
from tests.worlds.models import token_ids

CITIES = ["Oslo", "Ostrava", "New York", "Zürich", "new"]
# No two begin alike: after the first token the rest is given, and has the tokens that the tokenizer gives it.
PLACES = ["Paris", "London", "the moon", "Zürich", "a house", "users", "1"]
PROMPTS = ["The capital is", "SELECT name FROM", "Where do you live?"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "ü"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def base():
    return demo_base()


@pytest.fixture(scope="module")
def llm(base):
    llm = LLM(
        base,
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=32,
        max_model_len=256,
        num_kv_blocks=24,
        max_num_batched_tokens=64,
        warm_up=False,
    )
    yield llm
    del llm
    gc.collect()


def lora(number):
    return LoRARequest(NAMES[number], number + 1, adapter_folder(NAMES[number]))


def structured(params=None, **structure):
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 60, **(params or {})},
        structured_outputs=StructuredOutputsParams(**structure),
    )


def text_of(output):
    return output.outputs[0].text


class ChoiceOracle(Oracle):
    """Greedy answers that are one of some texts: transformers' own search, over all tokens that may come."""

    def __init__(self, base):
        from transformers import AutoTokenizer

        super().__init__(base, torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        for name in NAMES[:2]:
            self.load(name, adapter_folder(name))
        # What each token is in bytes: a character may be in pieces.
        letters = bytes_of_letters()
        self.bytes = [
            b"" if i in self.tokenizer.all_special_ids else bytes(letters[letter] for letter in token)
            for i, token in enumerate(self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer))))
        ]
        self.ids = defaultdict(list)
        for i, token in enumerate(self.bytes):
            self.ids[token].append(i)

    def allowed(self, so_far, texts):
        """Ids of tokens after which the bytes may still become one of the texts; the end, where they are one."""
        rests = [text[len(so_far) :] for text in texts if text.startswith(so_far)]
        beginnings = {rest[:n] for rest in rests for n in range(1, len(rest) + 1)}
        ids = sorted(i for token in beginnings & self.ids.keys() for i in self.ids[token])
        return ids + [self.tokenizer.eos_token_id] * (so_far in texts)

    def next_tokens(self, so_far, texts):
        """As `allowed`; where only one text is left, the token that the tokenizer makes of its rest."""
        left = [text[len(so_far) :] for text in texts if text.startswith(so_far)]
        if len(left) > 1 or not left[0]:
            return self.allowed(so_far, texts)
        return self.tokenizer.encode(left[0].decode())[:1]

    def choose(self, adapter, prompt, texts):
        ids = self.tokenizer(prompt, return_tensors="pt")
        length = ids["input_ids"].shape[1]
        texts = [text.encode() for text in texts]

        def allowed(_, tokens):
            return self.next_tokens(b"".join(self.bytes[t] for t in tokens[length:].tolist()), texts)

        output = self.call(
            adapter,
            lambda model: model.generate(
                **ids, max_new_tokens=20, do_sample=False, prefix_allowed_tokens_fn=allowed
            ),
        )
        return output[0, length:].tolist()


def bytes_of_letters():
    """GPT-2's alphabet, from its definition: printable bytes stand for themselves, the others follow from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


@pytest.fixture(scope="module")
def oracle(base):
    return ChoiceOracle(base)


def test_choices_are_what_transformers_and_peft_choose(llm, oracle):
    cases = [(None, PROMPTS[0]), (lora(0), PROMPTS[1]), (lora(1), PROMPTS[0]), (lora(1), PROMPTS[1])]

    outputs = llm.generate(
        [prompt for _, prompt in cases],
        structured(choice=PLACES),
        lora_request=[adapter for adapter, _ in cases],
    )

    for (adapter, prompt), output in zip(cases, outputs):
        expected = oracle.choose(adapter and adapter.lora_name, prompt, PLACES)
        assert output.outputs[0].token_ids == expected, (adapter, prompt)
        assert text_of(output) in PLACES
        assert output.outputs[0].finish_reason == "stop"
    assert len({text_of(output) for output in outputs}) > 1, "the prompts decide"


@pytest.mark.parametrize("seed", by_day(range(6)))
def test_masks_hold_every_token_that_may_come_and_no_other(llm, oracle, seed):
    """Where the next letter is given, some of them are enough: the tokenizer's own for what is given."""
    texts = [city.encode() for city in CITIES]
    seen = []
    sampler = llm.llm_engine.runner.sampler

    def spy(_, args):
        seen.append([None if mask is None else set(mask.nonzero()[:, 0].tolist()) for mask in args[5]])

    hook = sampler.register_forward_pre_hook(spy)
    output = llm.generate([PROMPTS[0]], structured({"temperature": 5.0, "seed": seed}, choice=CITIES))[0]
    hook.remove()

    so_far = b""
    for [mask], token in zip(seen, output.outputs[0].token_ids, strict=True):
        allowed = set(oracle.allowed(so_far, texts))
        next_letters = {text[len(so_far) : len(so_far) + 1] for text in texts if text.startswith(so_far)}
        assert mask == allowed if len(next_letters) > 1 else token in mask <= allowed
        so_far += oracle.bytes[token]


@pytest.mark.nightly
def test_an_engine_one_step_ahead_follows_the_structure(llm, base):
    args = EngineArgs(str(base), dtype="float32", max_model_len=256, num_kv_blocks=24, warm_up=False)
    answers = []
    for one in (llm.llm_engine, run_ahead(LLMEngine.from_engine_args(args))):
        for i, seed in enumerate((3, 4)):
            one.add_request(str(i), PROMPTS[i], structured({"temperature": 5.0, "seed": seed}, choice=CITIES))
        one.add_request("free", PROMPTS[2], greedy(12))
        answers.append({name: text_of(output) for name, output in run(one).items()})

    assert answers[0] == answers[1]
    assert {answers[1]["0"], answers[1]["1"]} <= set(CITIES)
    assert one.ahead.left == len(one.trace)
    assert not one.runner.row_sampler.masks._matchers


@pytest.mark.nightly
def test_those_beside_it_answer_as_if_alone(llm):
    free = greedy(12)
    alone = [text_of(llm.generate([prompt], free, lora_request=lora(0))[0]) for prompt in PROMPTS]

    params = [free, structured(json=SCHEMA), free, structured(regex="[0-9]{3}-[a-f]{2}"), free]
    prompts = [PROMPTS[0], "x", PROMPTS[1], "y", PROMPTS[2]]
    outputs = llm.generate(prompts, params, lora_request=[lora(0), lora(1), lora(0), None, lora(0)])

    assert [text_of(outputs[i]) for i in (0, 2, 4)] == alone
    jsonschema_rs.validate(SCHEMA, json.loads(text_of(outputs[1])))
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text_of(outputs[3]))


@pytest.mark.parametrize("seed", by_day(range(3)))
def test_drawn_answers_are_documents_of_the_schema(llm, seed):
    params = structured({"temperature": 1.5, "n": 2, "seed": seed, "max_tokens": 120}, json=SCHEMA)

    [output] = llm.generate(["Describe a person:"], params, lora_request=lora(seed % 2))

    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(answer.text))
    assert len({answer.text for answer in output.outputs}) > 1


def test_any_object_and_a_grammar(llm):
    outputs = llm.generate(
        ["JSON:"] * 2,
        [
            structured({"max_tokens": 100, "temperature": 1.0, "seed": 5}, json_object=True),
            structured(grammar='start: "a" ("," "b")~3 "."'),
        ],
    )

    first = outputs[0].outputs[0]
    assert first.text.startswith("{")
    assert first.finish_reason == "length" or isinstance(json.loads(first.text), dict)
    assert text_of(outputs[1]) == "a,b,b,b."


@pytest.mark.nightly
def test_who_is_preempted_goes_on_where_it_was(base):
    prompts = [f"{prompt} number {i}" for i, prompt in enumerate(PROMPTS * 2)]
    params = [
        structured({"max_tokens": 60, "seed": i, "temperature": 1.2}, json=SCHEMA)
        for i in range(len(prompts))
    ]

    def answers(blocks):
        llm = LLM(base, dtype="float32", max_model_len=128, num_kv_blocks=blocks, warm_up=False)
        outputs = llm.generate(prompts, params)
        return [text_of(output) for output in outputs], llm.llm_engine.scheduler.num_preemptions

    roomy, none = answers(60)
    crowded, some = answers(10)

    assert (none, some > 0) == (0, True)
    assert crowded == roomy


def test_logprobs_are_those_of_the_model(llm):
    [output] = llm.generate([PROMPTS[0]], structured({"logprobs": 1}, choice=["Zürich"]))

    first = output.outputs[0].logprobs[0]
    own = first[output.outputs[0].token_ids[0]]
    assert own.rank > 1
    assert any(each.rank == 1 for each in first.values())


def test_a_bias_does_not_bring_back_what_is_not_allowed(llm):
    token = llm.get_tokenizer().encode("Paris")[0]

    [output] = llm.generate([PROMPTS[0]], structured({"logit_bias": {token: 100.0}}, choice=CITIES))

    assert text_of(output) in CITIES
    assert not llm.llm_engine.runner.row_sampler.masks._matchers, "nothing is kept of requests that ended"


def test_without_a_tokenizer_it_is_refused_before_anything_changes(tmp_path_factory):
    base = str(tiny_world(tmp_path_factory).base)
    args = EngineArgs(model=base, max_model_len=64, warm_up=False, skip_tokenizer_init=True)
    engine = LLMEngine.from_engine_args(args)

    with pytest.raises(
        ValueError, match="has structured_outputs, which speak of text, but there is no tokenizer"
    ):
        engine.add_request("r", {"prompt_token_ids": token_ids(5, seed=1)}, structured(choice=["a"]))

    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "structure",
    by_day(
        [
            {"regex": "Hb\U00040f4d"},
            {"choice": ["Oslo", "\U00040f4d"]},
            {"json": {"const": "\U00040f4d"}},
            {"grammar": 'start: "\U00040f4d"'},
        ],
        one_in=4,
    ),
)
def test_what_no_tokens_write_is_refused_before_anything_changes(llm, structure):
    """The vocabulary of the demo model has no token for one of this character's bytes."""
    with pytest.raises(ValueError, match="which no tokens of the model make"):
        llm.generate(PROMPTS[:1], structured(**structure))

    assert text_of(llm.generate(PROMPTS[:1], structured(choice=["Zürich 漢 😀"]))[0]) == "Zürich 漢 😀"


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"json_object": False}, "exactly one"),
        ({"regex": "("}, "regex of the structured outputs cannot be read: .*unclosed group"),
        ({"grammar": "start: nobody"}, "grammar of the structured outputs cannot be read: .*nobody"),
        ({"json": {"type": "strange"}}, "json of the structured outputs cannot be read: .*strange"),
        ({"json": "{"}, "json of the structured outputs is no JSON schema"),
        ({"json": {"type": {1, 2}}}, "json of the structured outputs is no JSON schema"),
        ({"regex": 5}, "regex of the structured outputs must be text"),
        ({"regex": "a" * 65_537}, "regex .* at most 65536 characters"),
        ({"json": " " * 65_537}, "json .* at most 65536 characters"),
        ({"choice": []}, "choice of the structured outputs must be 1 to 1024 texts"),
        ({"choice": ["a", ""]}, "none empty"),
        ({"choice": "abc"}, "must be 1 to 1024 texts"),
    ],
)
def test_a_structure_that_cannot_be_followed_is_refused(structure, message):
    with pytest.raises(ValueError, match=message) as error:
        StructuredOutputsParams(**structure)

    assert len(str(error.value)) <= 500


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_what_contradicts_the_structures_end_is_refused(params):
    with pytest.raises(ValueError, match="leave ignore_eos and min_tokens out"):
        structured(params, choice=["a"])


def test_a_structure_goes_to_another_process_as_it_was_given():
    """Without what was worked out of it: a schema is short, and its form for llguidance is not."""
    given = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})

    sent = pickle.dumps(given)
    received = pickle.loads(sent)

    assert received == given and received.guidance == given.guidance
    assert given.guidance.encode() not in sent


def test_something_else_for_a_structure_is_refused():
    with pytest.raises(ValueError, match="must be StructuredOutputsParams or None"):
        SamplingParams(structured_outputs={"json": {}})
