"""What the text of an answer has to be. Stands for `StructuredOutputsParams` of vllm/sampling_params.py (v0.22.1)."""

import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from minivllm.errors import shown

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
