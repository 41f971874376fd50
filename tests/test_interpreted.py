"""Triton's interpreter keeps types and sizes here, to be quicker (`interpreted`): no kernel sees that."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.tools.interpreted import NAMES, keep_the_language_replaced


@pytest.fixture
def language():
    if torch.cuda.is_available():
        pytest.skip("here kernels are compiled")
    import triton.language
    import triton.runtime.interpreter

    keep_the_language_replaced()
    assert triton.runtime.interpreter.has_less_to_do, "this Triton lacks one of NAMES: nothing is replaced"
    return triton.language


def test_blocks_of_one_type_have_its_shape_and_values_of_their_own(language):
    for element, other in (
        (language.float32, language.int32),
        (language.pointer_type(language.int8), language.int8),
    ):
        one, same, turned, typed = (
            language.tensor(object(), language.block_type(of, shape))
            for of, shape in ((element, [4, 8]), (element, [4, 8]), (element, [8, 4]), (other, [4, 8]))
        )

        assert one.type == same.type and turned.type != one.type != typed.type
        assert one.handle is not same.handle
        assert [size.value for size in one.shape] == [4, 8] and one.numel.value == 32
        assert [size.value for size in turned.shape] == [8, 4]
        assert one.dtype == element and typed.dtype == other


def test_what_is_no_size_is_refused_though_it_equals_one(language):
    language.block_type(language.float32, [16])

    with pytest.raises(TypeError, match="float"):
        language.block_type(language.float32, [16.0])


@pytest.mark.parametrize("name", NAMES)
def test_an_interpreter_that_lacks_a_name_stays_as_it_is(monkeypatch, name):
    module = SimpleNamespace()
    for known in NAMES:
        _set(module, known)
    _set(module, name, remove=True)
    before = repr(module)
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", module)

    keep_the_language_replaced()

    assert not module.has_less_to_do  # nothing is replaced
    del module.has_less_to_do
    assert repr(module) == before


def _set(owner, name, remove=False):
    first, _, rest = name.partition(".")
    if rest:
        vars(owner).setdefault(first, SimpleNamespace())
        _set(getattr(owner, first), rest, remove)
    elif remove:
        delattr(owner, first)
    else:
        setattr(owner, first, "there")
