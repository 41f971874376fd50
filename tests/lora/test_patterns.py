"""`rank_pattern` and `alpha_pattern` come from anybody: they mean what they mean to `re`, and take no time that counts.

Incident 26. What is not for RE2, or takes too much of it, is refused by name.
"""

import random
import re
from functools import partial

import pytest

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.lora.patterns import Patterns
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.options.target_parameters import rank_of
from tests.tools.limits import Peak, TimeLimit
from tests.worlds.adapter_folders import HANGS, MOST_MEMORY, good_config


def helper(**changes):
    return PEFTHelper.from_dict(good_config(**changes), LORA_EXTENSIONS)


NEVER_ENDING = [
    *(r"(\w|\w\w|_|\.)+[!?]", r"(\w|_|\.|\w\w\w)*[x-z!]", "(.*)*x", "(.+)+y", "(a|a|.)*[!?]"),
    *(r"(\w+\.?)+[!?]", "x?" * 60 + "x" * 60, "(" * 60 + "x" + ")+" * 60),
]
COSTLY = ["(?:.*a){200}.*q", ".*a.{500}z", "(.*a.{200}|.*b.{200})z", "(a|b|_|.){999}"]
NOT_FOR_RE2 = {
    ".{1000000}" * 20: "RE2 cannot read: invalid repetition size",
    "x" * 257: "at most 256",
    "((a{1,100}){1,100}){1,100}": "RE2 cannot read",
    "(a|bc|.d){900}" * 9: "RE2 cannot read",
    r"(?!.*mlp).*": r"RE2 cannot read: .*\(\?!",
    r"(?<=\.)q_proj": "RE2 cannot read",
    r"(q|k)\1": "RE2 cannot read",
    r"q{,2}": "RE2 reads otherwise",
    "[[:alpha:]]": "otherwise",
    r"q\B": "RE2 reads otherwise",
    r"\pL": "no regular expression",
    "(": "no regular expression",
}
ORDINARY = [
    *("q_proj", "self_attn.q_proj", "^model.layers.1.self_attn.q_proj", r"layers\.\d+\.mlp\.down_proj"),
    *(r".*\.0\..*", r"layers\.(0|10)\..*", "q_proj|down_proj", r"layers\.[0-9]{1,2}\..*proj", "proj", ""),
    *("(?:0|1|2){2,3}.*", "q_proj{e<=3}", r"\w+_proj$", ".", "experts.*"),
    r"layers\.(1\d|2[0-3])\.self_attn\.[qkv]_proj",
]


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("key", NEVER_ENDING)
def test_that_keep_re_busy_for_ever_do_not_match_in_no_time(field, key):
    adapter = helper(r=6, lora_alpha=6, **{field: {key: 3}})
    ask = partial(rank_of, adapter) if field == "rank_pattern" else adapter.alpha

    with TimeLimit(HANGS):
        assert ask(f"model.layers.0.self_attn.q_proj{'_of_a_name_that_goes_on' * 4}") == 6


@pytest.mark.parametrize("key", COSTLY)
def test_that_are_as_costly_as_they_can_be_are_refused(key):
    adapter = helper(alpha_pattern={"x?" * number + key: 3 for number in range(30)})
    names = (f"model.layers.{number}.self_attn.{'ab_' * 160}" for number in range(5000))

    with TimeLimit(HANGS), pytest.raises(ValueError, match=r"alpha_pattern has key .* too long"):
        for name in names:
            adapter.alpha(name)


@pytest.mark.parametrize(
    ("count", "key", "why"),
    [
        (2049, "layers.{}.q_proj", "2049 entries, at most 2048"),
        (33, "layers.{}.(q|v)_proj", "33 keys that are no plain names, at most 32"),
    ],
)
def test_too_many_are_refused_by_their_number(count, key, why):
    with pytest.raises(ValueError, match=f"alpha_pattern has {why}"):
        helper(alpha_pattern={key.format(number): 3 for number in range(count)})


def test_one_for_each_linear_of_a_large_model_are_honoured():
    names = [f"model.layers.{i}.mlp.{part}_proj" for i in range(126) for part in ("up", "gate", "down")]
    adapter = helper(r=2, lora_alpha=1, alpha_pattern={name: 2 * i for i, name in enumerate(names)})

    with TimeLimit(HANGS):
        assert [adapter.scaling(name, 2) for name in names] == list(range(len(names)))


@pytest.mark.parametrize(("key", "why"), NOT_FOR_RE2.items())
def test_that_take_memory_or_are_not_for_re2_are_refused_before_they_match(key, why):
    peak = Peak()

    with TimeLimit(HANGS), pytest.raises(ValueError, match=rf"rank_pattern has key .*{why}"):
        helper(rank_pattern={key: 3})

    assert peak.growth() < MOST_MEMORY


@pytest.mark.parametrize("key", ORDINARY)
def test_ordinary_ones_mean_what_they_mean_to_re(key):
    names = [
        f"model.layers.{layer}.{module}"
        for layer in (0, 1, 10, 23)
        for module in ("self_attn.q_proj", "mlp.down_proj", "mlp.experts.3.w1")
    ]
    patterns, expression = Patterns(), rf"(.*\.)?({key})$"

    found = [patterns.match(expression, name) for name in names]

    assert found == [re.match(expression, name) is not None for name in names]


ATOMS = [*"abq_.01{}-", r"\.", r"\w", r"\d", r"\W", r"\b", "^", "$", "[a-c]", "[^.]", r"[\w.]"]


def some_pattern(rng, depth=0):
    """A regular expression of short names."""
    if depth > 2 or rng.random() < 0.4:
        return rng.choice(ATOMS)
    inner = some_pattern(rng, depth + 1)
    more = rng.choice(["", some_pattern(rng, depth + 1)])
    forms = [
        f"{inner}{more}",
        f"({inner}|{more})",
        f"(?:{inner}){{1,2}}",
        f"({inner})*",
        f"{inner}+",
        f"{inner}??",
    ]
    return rng.choice(forms)


def test_of_any_kind_mean_what_they_mean_to_re():
    rng, judged = random.Random(5), 0
    for _ in range(1500):
        key = "".join(some_pattern(rng) for _ in range(rng.randint(1, 3)))
        expression = rf"(.*\.)?({key})$"
        try:
            patterns = Patterns({key: "rank_pattern"})
        except ValueError:
            continue
        for name in ("", "a.b_q", "abb.q01", "q", ".".join(rng.choice("abq_01") for _ in range(5))):
            judged += 1
            expected = re.match(expression, name) is not None
            assert patterns.match(expression, name) == expected, (key, name)
    assert judged > 5000


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_with_a_value_of_another_kind_name_the_field_and_the_key(field):
    with pytest.raises(ValueError, match=rf"{field}: LoRA \w+ q_proj must be .*, got 'x'"):
        helper(**{field: {"q_proj": "x"}})
