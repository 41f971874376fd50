"""What names an adapter (lab 1.1)."""

from pathlib import Path

import pytest

from minivllm.lora.request import LoRARequest

pytestmark = pytest.mark.lab("1.1")


def test_vllms_short_names_are_the_fields():
    request = LoRARequest("sql", 7, "/adapters/sql")

    assert (request.name, request.adapter_id, request.path) == ("sql", 7, "/adapters/sql")


@pytest.mark.parametrize("adapter_id", [0, -1, 2**63, True, 1.0, "1", None])
def test_an_id_that_is_no_int_from_1_is_refused(adapter_id):
    """0 is the base model's in batch mappings; mappings are of 64 bits."""
    with pytest.raises(ValueError, match=f"lora_int_id of adapter 'sql' must be an int.*{adapter_id!r}"):
        LoRARequest("sql", adapter_id, "/adapters/sql")


@pytest.mark.parametrize("adapter_id", [1, 2**63 - 1])
def test_the_ends_of_the_range_of_ids_are_served(adapter_id):
    assert LoRARequest("sql", adapter_id, "/adapters/sql").lora_int_id == adapter_id


@pytest.mark.parametrize("name", ["", None, 3, ["sql"]])
def test_a_name_that_is_empty_or_no_text_is_refused(name):
    with pytest.raises(ValueError, match="lora_name must be text that is not empty"):
        LoRARequest(name, 1, "/adapters/sql")


@pytest.mark.parametrize("path", ["", None, 3, b"/adapters/sql"])
def test_a_path_that_is_empty_or_no_text_is_refused(path):
    with pytest.raises(ValueError, match="lora_path of adapter 'sql' must name its folder"):
        LoRARequest("sql", 1, path)


def test_a_request_without_a_path_is_refused():
    with pytest.raises(ValueError, match="lora_path of adapter 'sql' must name its folder"):
        LoRARequest("sql", 1)


def test_a_pathlib_path_is_a_path():
    assert LoRARequest("sql", 1, Path("/adapters/sql")) == LoRARequest("sql", 1, "/adapters/sql")


def test_requests_for_one_adapter_are_one_key():
    """How it was asked for does not count: neither the flag of a reload nor the base model's name."""
    plain = LoRARequest("sql", 1, "/adapters/sql")
    reload = LoRARequest("sql", 1, "/adapters/sql", base_model_name="base", load_inplace=True)

    assert plain == reload
    assert len({plain, reload}) == 1


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
