"""What names an adapter (lab 1.1)."""

from pathlib import Path

import pytest

from minivllm.lora.request import LoRARequest

pytestmark = pytest.mark.lab("1.1")


def refusal(**changes):
    """What is said when a good request with these changes is refused."""
    fields = {"lora_name": "sql", "lora_int_id": 1, "lora_path": "/adapters/sql", **changes}
    try:
        LoRARequest(**fields)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"a request with {changes} was accepted; it must raise ValueError")


def assert_says(message, *words):
    missing = [str(word) for word in words if str(word) not in message]
    assert not missing, f"the message does not name {missing}: {message!r}"


def test_vllms_short_names_are_the_fields():
    request = LoRARequest("sql", 7, "/adapters/sql")

    assert (request.name, request.adapter_id, request.path) == ("sql", 7, "/adapters/sql")


@pytest.mark.parametrize("adapter_id", [0, -1, 2**63, True, 1.0, "1", None])
def test_an_id_that_is_no_int_from_1_is_refused(adapter_id):
    """0 is the base model's in batch mappings; mappings are of 64 bits."""
    message = refusal(lora_int_id=adapter_id)

    assert_says(message, "lora_int_id", "sql", repr(adapter_id))


@pytest.mark.parametrize("adapter_id", [1, 2, 2**63 - 1])
def test_the_ends_of_the_range_of_ids_are_served(adapter_id):
    assert LoRARequest("sql", adapter_id, "/adapters/sql").lora_int_id == adapter_id


@pytest.mark.parametrize("name", ["", None, 3, ["sql"]])
def test_a_name_that_is_empty_or_no_text_is_refused(name):
    message = refusal(lora_name=name)

    assert_says(message, "lora_name", repr(name))


@pytest.mark.parametrize("path", ["", None, 3, b"/adapters/sql"])
def test_a_path_that_is_empty_or_no_text_is_refused(path):
    message = refusal(lora_path=path)

    assert_says(message, "lora_path", "sql", repr(path))


def test_a_request_without_a_path_is_refused():
    """The field has a default, as in vLLM, where an assert refuses it."""
    with pytest.raises(ValueError, match="lora_path"):
        LoRARequest("sql", 1)


def test_a_pathlib_path_becomes_the_string_it_stands_for():
    path = LoRARequest("sql", 1, Path("/adapters/sql")).path

    assert isinstance(path, str), f"the path is still a {type(path).__name__}"
    assert path == "/adapters/sql"


@pytest.mark.parametrize("path", ["", "/adapters/sql"])
def test_the_path_of_a_request_with_tensors_stands_for_the_tensors(path):
    """Two requests with the same tensors are for one adapter, whatever path stands beside them."""
    tensors, others = {"a": object()}, {"a": object()}

    first, again, other = (LoRARequest("sql", 1, path, lora_tensors=t) for t in (tensors, tensors, others))

    assert first.lora_path == f"memory:{id(tensors)}"
    assert first == again and first != other


def test_tensors_count_even_if_there_are_none_of_them():
    """An empty dict is an adapter that holds nothing, which the loader will refuse; it does not ask for the folder."""
    tensors = {}

    request = LoRARequest("sql", 1, "/adapters/sql", lora_tensors=tensors)

    assert request.lora_path == f"memory:{id(tensors)}"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora_name": "", "lora_int_id": 0, "lora_path": ""}, "lora_name"),
        ({"lora_int_id": 0, "lora_path": ""}, "lora_int_id"),
        ({"lora_int_id": 0, "lora_path": None}, "lora_int_id"),
    ],
)
def test_of_several_that_are_wrong_the_first_is_named(changes, named):
    assert_says(refusal(**changes), named)


def test_requests_for_one_adapter_are_one_key():
    """How it was asked for does not count: neither the flag of a reload, the base model's name, nor the path's type."""
    plain = LoRARequest("sql", 1, "/adapters/sql")
    reload = LoRARequest("sql", 1, "/adapters/sql", base_model_name="base", load_inplace=True)
    by_path = LoRARequest("sql", 1, Path("/adapters/sql"))

    assert plain == reload == by_path
    assert len({plain, reload, by_path}) == 1


@pytest.mark.parametrize(
    "other", [("alias", 1, "/adapters/sql"), ("sql", 2, "/adapters/sql"), ("sql", 1, "/adapters/new")]
)
def test_requests_that_differ_in_name_id_or_path_are_different_keys(other):
    """vLLM compares names alone: there the same name with other weights hits the other's cache."""
    request = LoRARequest("sql", 1, "/adapters/sql")

    assert request != LoRARequest(*other)
    assert len({request, LoRARequest(*other)}) == 2


def test_a_request_does_not_change_under_whoever_holds_it():
    request = LoRARequest("sql", 1, "/adapters/sql")

    with pytest.raises(AttributeError):
        request.lora_int_id = 2
