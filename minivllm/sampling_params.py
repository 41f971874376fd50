"""How one request picks its tokens and when it stops. Stands for vllm/sampling_params.py (v0.22.1)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from minivllm.errors import LARGEST_INT, is_finite, is_integral, require_bool, require_count, shown

# Below this a temperature is a greedy choice (vLLM's _SAMPLING_EPS): dividing by less only breeds infinities.
GREEDY_TEMPERATURE = 1e-5

# What one request may have looked for in every token of its answer: all others wait for that.
MOST_STOP_STRINGS = 64
LONGEST_STOP_STRING = 1024
MOST_STOP_IDS = 1024
MOST_BIASES = 1024
MOST_ANSWERS = 128  # as OpenAI's interface allows; vLLM: 16,384
# All requests of an engine wait while one's grammar is read, so it has an end.
LONGEST_GRAMMAR = 65_536
MOST_CHOICES = 1024


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of these says what an answer may be. vLLM: `StructuredOutputsParams`, without its options for white space.

    json          a JSON schema, as a dict or as text; the answer is a document that it allows
    regex         a regular expression that the whole answer matches, in the syntax of Rust's `regex`
    choice        texts, at most 1,024, one of which is the answer
    grammar       in the Lark form that llguidance reads
    json_object   True: any JSON object

    Answers in JSON have no white space but one blank after each comma and colon. A model that is small would go on
    with blanks for ever. ValueError: none or several are given, one is too long (65,536 characters), or cannot be read;
    or llguidance, which reads them, is not installed.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1 or self.json_object is False:
            names = ", ".join(field.name for field in fields(self))
            raise ValueError(
                f"structured outputs need exactly one of {names}; got {', '.join(given) or 'none'}"
            )
        if problem := _problem(self.guidance):
            raise ValueError(f"{given[0]} of the structured outputs cannot be read: {problem}")

    def __getstate__(self) -> dict[str, Any]:
        """What is worked out of the fields is worked out again where it is needed."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def guidance(self) -> str:
        """It in llguidance's own form."""
        matcher = _library().LLMatcher
        if self.json is not None or self.json_object:
            schema = _short("json", _as_text({"type": "object"} if self.json_object else self.json))
            return matcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
        if self.choice is not None:
            return matcher.grammar_from_lark(f"start: {_short('choice', _alternatives(self.choice))}")
        if self.regex is not None:
            return matcher.grammar_from_regex(_short("regex", self.regex))
        return matcher.grammar_from_lark(_short("grammar", self.grammar))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """vLLM's SamplingParams, without beam search.

    n: so many answers, each drawn for itself: at most 128, and 1 where the likeliest token is taken. With a seed,
        answer i draws with `seed + i`.
    presence_penalty: in [-2, 2]; taken off the logit of each token that the answer has.
    frequency_penalty: in [-2, 2]; taken off as often as the answer has the token.
    repetition_penalty: above 0; divides the logit of each token of prompt or answer, or multiplies it if negative. 1
        is off.
    logit_bias: token id -> what is added to its logit; at most 1,024. `logprobs` are those of the model, without it.
    temperature: 0 (below 1e-5) is greedy; the filters and the seed then change nothing.
    top_p: in (0, 1]; the smallest set of likeliest tokens that holds this mass. 1 is off.
    top_k: this many likeliest tokens, and those tied with the last. 0 (or -1) is off.
    min_p: in [0, 1]; tokens at least this likely relative to the likeliest. 0 is off.
    seed: makes a request's tokens its own, whatever it is batched with. None: the engine's generator.
    stop: string(s) that end the text; kept as a list, each once. They need `detokenize`. At most 64, of at most 1,024
        characters each.
    stop_token_ids: ids that end the request, beside the model's own end-of-sequence ids; kept as a list, each once. At
        most 1,024.
    ignore_eos: go on past the end-of-sequence ids (but never past `stop_token_ids`).
    max_tokens: at most so many new tokens; None: until the context is full.
    min_tokens: neither ids nor strings stop the request before so many new tokens.
    logprobs: None, or how many of the likeliest tokens to report beside each sampled one.
    prompt_logprobs: None, or how many to report beside each token of the prompt.
    structured_outputs: None, or what the text has to be. `logprobs` are those of the model, as if it might be anything.
    Numbers may be of any kind (numpy's, too) and are kept as int or float.
    Raises ValueError naming the field, its value and what is allowed.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_flags()
        self._check_distribution()
        self._check_penalties()
        self._check_length()
        self._check_structure()
        self._store("stop", _stop_strings(self.stop))
        self._store("stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise ValueError(f"stop strings {shown(self.stop)} need the text to be made; leave detokenize on")

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @cached_property
    def changes_logits(self) -> bool:
        """True if a penalty or a bias may make another token the likeliest."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1) or bool(self.logit_bias)

    @cached_property
    def takes_likeliest(self) -> bool:
        """True if the argmax of the logits is all that is wanted of them, once there are `min_tokens`."""
        is_raw = self.logprobs is None and self.structured_outputs is None and not self.changes_logits
        return self.is_greedy and is_raw

    def _check_flags(self) -> None:
        flags = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
        require_bool(**{name: getattr(self, name) for name in flags})

    def _check_distribution(self) -> None:
        self._check_float("temperature", lambda t: t >= 0, "a finite number of at least 0 (0 is greedy)")
        self._check_float("top_p", lambda p: 0 < p <= 1, "in (0, 1] (1 is off)")
        self._check_float("min_p", lambda p: 0 <= p <= 1, "in [0, 1] (0 is off)")
        self._check_int("top_k", -1, "an integer of at least 1, or 0 for off")
        if self.seed is not None:
            self._check_int("seed", 0, "an integer in [0, 2**64) or None", largest=2**64 - 1)

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_float(name, lambda penalty: -2 <= penalty <= 2, "in [-2, 2] (0 is off)")
        self._check_float("repetition_penalty", lambda penalty: penalty > 0, "above 0 (1 is off)")
        if self.logit_bias is not None:
            self._store("logit_bias", _biases(self.logit_bias))

    def _check_length(self) -> None:
        self._check_int("n", 1, f"an integer in [1, {MOST_ANSWERS}]", largest=MOST_ANSWERS)
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"n must be 1 where the likeliest token is taken (temperature 0), got {self.n}: all would be the same"
            )
        if self.max_tokens is not None:
            self._check_int("max_tokens", 1, "an integer of at least 1, or None for all there is room for")
        self._check_int(
            "min_tokens", 0, f"an integer in [0, max_tokens={self.max_tokens}]", largest=self.max_tokens
        )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, 0, "an integer of at least 0, or None")

    def _check_structure(self) -> None:
        structure = self.structured_outputs
        if structure is not None and not isinstance(structure, StructuredOutputsParams):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams or None, got {shown(structure)}"
            )
        if structure is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError(
                "structured_outputs says when an answer ends; leave ignore_eos and min_tokens out"
            )

    def _check_float(self, name: str, allows: Callable[[float], bool], allowed: str) -> None:
        """Keep it as a float: an int may be larger than what tensors can be divided by."""
        value = getattr(self, name)
        if not (is_finite(value) and allows(float(value))):
            raise ValueError(f"{name} must be {allowed}, got {shown(value)}")
        if type(value) is not float:
            self._store(name, float(value))

    def _check_int(self, name: str, smallest: int, allowed: str, largest: int | None = None) -> None:
        """Keep it as an int. Where no largest is given, it must fit into a tensor."""
        value = getattr(self, name)
        if not (is_integral(value) and smallest <= value and (largest is None or value <= largest)):
            raise ValueError(f"{name} must be {allowed}, got {shown(value)}")
        if largest is None:
            require_count(name, value)
        if type(value) is not int:
            self._store(name, int(value))


def _stop_strings(stop: str | list[str] | None) -> list[str]:
    strings = [stop] if isinstance(stop, str) else _listed("stop", stop, MOST_STOP_STRINGS)
    if not all(isinstance(string, str) for string in strings):
        raise ValueError(f"stop must hold strings only, got {shown(stop)}")
    if "" in strings:
        raise ValueError(f"stop must not hold an empty string, which would match at once, got {shown(stop)}")
    if (longest := max(map(len, strings), default=0)) > LONGEST_STOP_STRING:
        raise ValueError(
            f"stop must hold strings of at most {LONGEST_STOP_STRING} characters, got one of {longest}"
        )
    return list(dict.fromkeys(strings))


def _stop_ids(stop_token_ids: list[int] | None) -> list[int]:
    ids = _listed("stop_token_ids", stop_token_ids, MOST_STOP_IDS)
    if not all(is_integral(token_id) and 0 <= token_id <= LARGEST_INT for token_id in ids):
        raise ValueError(
            f"stop_token_ids must be token ids, integers of at least 0, got {shown(stop_token_ids)}"
        )
    return list(dict.fromkeys(map(int, ids)))


def _biases(logit_bias: dict[int, float]) -> dict[int, float]:
    if not isinstance(logit_bias, Mapping):
        raise ValueError(f"logit_bias must be a dict of token ids and what is added, got {shown(logit_bias)}")
    if len(logit_bias) > MOST_BIASES:
        raise ValueError(f"logit_bias may hold {MOST_BIASES} at most, got {len(logit_bias)}")
    for token_id, bias in logit_bias.items():
        if not (is_integral(token_id) and 0 <= token_id <= LARGEST_INT):
            raise ValueError(
                f"logit_bias must name token ids, integers of at least 0, got {shown(logit_bias)}"
            )
        if not is_finite(bias):
            raise ValueError(f"logit_bias must add finite numbers, got {shown(logit_bias)}")
    return {int(token_id): float(bias) for token_id, bias in logit_bias.items()}


def _listed(name: str, value: Any, most: int) -> list[Any]:
    if value is not None and not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list, got {shown(value)}")
    if len(value or ()) > most:
        raise ValueError(f"{name} may hold {most} at most, got {len(value)}")
    return list(value or ())


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("structured outputs need llguidance; pip install 'minivllm[serve]'") from error
    return llguidance


def _problem(guidance: str) -> str:
    """Why it cannot be read, in one line; empty if it can."""
    return " ".join(_library().LLMatcher.validate_grammar(guidance).split())[:300]


def _short(name: str, text: Any) -> str:
    if not isinstance(text, str) or len(text) > LONGEST_GRAMMAR:
        raise ValueError(
            f"{name} of the structured outputs must be text of at most {LONGEST_GRAMMAR} characters, got {shown(text)}"
        )
    return text


def _as_text(schema: Any) -> str:
    """A schema as JSON, also one that is given as JSON."""
    given = _short("json", schema) if isinstance(schema, str) else schema
    try:
        return json.dumps(json.loads(given) if isinstance(given, str) else given)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json of the structured outputs is no JSON schema: {shown(schema)}") from error


def _alternatives(choice: Any) -> str:
    is_list = isinstance(choice, list | tuple) and 1 <= len(choice) <= MOST_CHOICES
    if not is_list or not all(isinstance(text, str) and text for text in choice):
        raise ValueError(
            f"choice of the structured outputs must be 1 to {MOST_CHOICES} texts, none empty, got {shown(choice)}"
        )
    return " | ".join(map(json.dumps, choice))
