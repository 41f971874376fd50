"""An adapter as a whole: modules by name, identity, and weights that are the engine's own (lab 1.6)."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.lora.lora_model import LoRAModel, pair_up
from minivllm.lora.peft_helper import PEFTHelper
from tests.oracles.rows import assert_rows_equal
from tests.worlds.adapter_folders import (
    DOWN,
    PREFIX,
    RANK,
    WIDTHS,
    Q,
    V,
    good_config,
    good_tensors,
    load,
    write,
)

A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


def from_tensors(tensors, adapter_id=1, config=None, **options):
    helper = PEFTHelper.from_dict(config or good_config(), LORA_EXTENSIONS)
    return LoRAModel.from_lora_tensors(adapter_id, tensors, helper, **options)


def assert_modules(lora, expected):
    """The adapter has these modules and no others."""
    found = set(lora.loras)
    lacking, more = sorted(expected - found), sorted(found - expected)
    assert not lacking and not more, f"modules that are lacking: {lacking}, that should not be there: {more}"


def refusal(tensors, **options):
    """What is said when these tensors are refused."""
    try:
        lora = from_tensors(tensors, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"it loaded, with {sorted(lora.loras)}; it must raise ValueError")


@pytest.mark.lab("1.6")
def test_every_module_holds_its_own_tensors_whatever_their_order_in_the_file():
    tensors = good_tensors()
    b_before_a = dict(sorted(tensors.items(), reverse=True))

    lora = from_tensors(b_before_a)

    assert_modules(lora, WIDTHS.keys())
    for module in WIDTHS:
        weights = lora.loras[module]
        assert_rows_equal(weights.lora_a, tensors[f"{PREFIX}{module}.lora_A.weight"], what=f"A of {module}")
        assert_rows_equal(weights.lora_b, tensors[f"{PREFIX}{module}.lora_B.weight"], what=f"B of {module}")
        assert (weights.module_name, weights.rank, weights.scaling) == (module, RANK, 2)


@pytest.mark.lab("1.6")
def test_a_modules_rank_is_its_tensors_and_its_scaling_goes_by_it():
    """Incident 9: with the config's r of 3 instead of its own 1, q_proj would be scaled by 2 where training had 6."""
    tensors = good_tensors()
    tensors[A], tensors[B] = tensors[A][:1], tensors[B][:, :1]
    config = good_config(rank_pattern={"q_proj": 1}, alpha_pattern={"down_proj": 15})

    lora = from_tensors(tensors, config=config)

    assert {m: (w.rank, w.scaling) for m, w in lora.loras.items()} == {Q: (1, 6), V: (3, 2), DOWN: (3, 5)}
    assert lora.rank == 3


@pytest.mark.lab("1.6")
def test_the_rank_of_an_adapter_is_the_largest_of_its_modules():
    tensors = good_tensors(rank=2)

    lora = from_tensors(
        tensors, config=good_config(r=8, rank_pattern={"q_proj": 2, "v_proj": 2, "down_proj": 2})
    )

    assert lora.rank == 2


@pytest.mark.lab("1.6")
def test_patterns_are_asked_by_the_checkpoints_name_where_the_model_has_another():
    """After renaming, the pattern would match nothing, and the module be scaled by 2."""
    mapper = SimpleNamespace(_map_name=lambda name: name.replace("self_attn.q_proj", "attention.query"))
    renamed = Q.replace("self_attn.q_proj", "attention.query")

    lora = from_tensors(
        good_tensors(), config=good_config(alpha_pattern={"q_proj": 15}), weights_mapper=mapper
    )

    assert_modules(lora, {renamed, V, DOWN})
    assert (lora.loras[renamed].module_name, lora.loras[renamed].scaling) == (renamed, 5)


@pytest.mark.lab("1.6")
def test_names_without_pefts_prefix_mean_the_same():
    with_prefix = from_tensors(good_tensors())
    without = from_tensors({name.removeprefix(PREFIX): tensor for name, tensor in good_tensors().items()})

    assert_modules(without, with_prefix.loras.keys())
    for module in WIDTHS:
        assert_rows_equal(
            without.loras[module].lora_b, with_prefix.loras[module].lora_b, what=f"B of {module}"
        )


@pytest.mark.lab("1.6")
def test_a_bias_on_b_goes_with_its_module():
    """PEFT's `lora_bias`; a module without one in the file has none."""
    tensors = good_tensors()
    tensors[f"{PREFIX}{Q}.lora_B.bias"] = bias = torch.linspace(-1, 1, 10)

    lora = from_tensors(tensors, config=good_config(lora_bias=True), dtype=torch.float64)

    assert_modules(lora, WIDTHS.keys())
    (found,) = lora.loras[Q].beside.values()
    scaled = lora.loras[Q].scaling * bias[None].double()
    assert_rows_equal(found, scaled, tolerance=1e-12, what=f"bias of {Q}")
    assert found.dtype == torch.float64
    assert [lora.loras[module].beside for module in WIDTHS if module != Q] == [{}] * (len(WIDTHS) - 1)


@pytest.mark.lab("1.6")
def test_the_callers_tensors_are_all_still_there():
    """A request in memory holds them for a reload, and for other engines."""
    tensors = {**good_tensors(), f"{PREFIX}lm_head.base_layer.weight": torch.ones(2, 2)}
    before = dict(tensors)

    from_tensors(tensors)

    assert tensors.keys() == before.keys()
    assert all(tensors[name] is tensor for name, tensor in before.items())


@pytest.mark.lab("1.6")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_bias_of_16_bits_is_scaled_in_the_dtype_it_is_converted_to(stored):
    """A product in 16 bits is rounded once more, and PEFT multiplies after it has converted."""
    tensors = good_tensors()
    tensors[f"{PREFIX}{Q}.lora_B.bias"] = bias = torch.linspace(-1, 1, 10).to(stored)
    config = good_config(lora_bias=True, r=3, lora_alpha=7)

    lora = from_tensors(tensors, config=config, dtype=torch.float32)

    (found,) = lora.loras[Q].beside.values()
    assert found.dtype == torch.float32
    assert_rows_equal(found, 7 / 3 * bias[None].double(), tolerance=1e-6, what=f"bias of {Q}")


@pytest.mark.lab("1.6")
@pytest.mark.parametrize("differs", [0, 1], ids=["equal numbers", "other numbers"])
def test_the_same_tensor_with_and_without_the_prefix_is_refused(differs):
    tensors = good_tensors()
    tensors[f"{Q}.lora_A.weight"] = tensors[A] + differs

    message = refusal(tensors)

    assert f"{Q}.lora_A.weight" in message


@pytest.mark.lab("1.6")
def test_a_module_under_two_of_the_checkpoints_names_is_refused():
    """The mapper makes one of both, of which the second would be served and the first lost."""
    mapper = SimpleNamespace(_map_name=lambda name: name.replace("old_attn", "self_attn"))
    tensors = good_tensors()
    for side in ("A", "B"):
        name = f"{PREFIX}{Q}.lora_{side}.weight"
        tensors[name.replace("self_attn", "old_attn")] = tensors[name] + 1

    message = refusal(tensors, weights_mapper=mapper)

    assert Q in message


@pytest.mark.lab("1.6")
@pytest.mark.parametrize(
    ("changes", "named", "options"),
    [
        ({A: None}, Q, {}),
        ({B: None}, Q, {}),
        ({A: torch.ones(2, 6)}, Q, {}),
        ({A: torch.ones(2, 6), B: torch.ones(10, 2)}, Q, {}),
        ({A: torch.ones(6)}, A, {}),
        ({A: torch.full((RANK, 6), float("nan"))}, Q, {}),
        ({A: torch.full((RANK, 6), 1e5)}, Q, {"dtype": torch.float16}),
        ({B: torch.full((10, RANK), 4e4)}, Q, {"dtype": torch.float16}),
        ({f"{PREFIX}model.norm.weight": torch.ones(6)}, "model.norm.weight", {}),
        ({f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(10)}, "lora_magnitude_vector", {}),
        ({f"{PREFIX}{Q}.lora_B.bias": torch.ones(10)}, "lora_B.bias", {}),
    ],
    ids=[
        "no A",
        "no B",
        "A and B of different ranks",
        "a rank that the config does not give",
        "not a matrix",
        "NaN",
        "Inf once converted",
        "Inf once converted and scaled by 2",
        "a layer of the base",
        "DoRA",
        "a bias",
    ],
)
def test_what_would_be_served_wrongly_is_refused_by_name(changes, named, options):
    """Incident 8: passed over, it loads, and the base model or something else is served."""
    tensors = {name: tensor for name, tensor in {**good_tensors(), **changes}.items() if tensor is not None}

    message = refusal(tensors, **options)

    assert named in message


@pytest.mark.lab("1.6")
@pytest.mark.parametrize("shape", [(RANK, 97), (RANK, 96)])
def test_an_embeddings_a_has_the_width_of_the_vocabulary(shape):
    name = f"{PREFIX}model.embed_tokens"
    tensors = {f"{name}.lora_embedding_A": torch.ones(shape), f"{name}.lora_embedding_B": torch.ones(6, RANK)}

    if shape[1] == 97:
        assert_modules(from_tensors(tensors, model_vocab_size=97), {"model.embed_tokens"})
    else:
        assert "lora_embedding_A" in refusal(tensors, model_vocab_size=97)


@pytest.mark.lab("1.6")
@pytest.mark.parametrize(
    ("others", "skip_prefixes"),
    [
        pytest.param(
            {f"{PREFIX}model.embed_tokens.base_layer.weight": torch.ones(97, 6)}, None, id="base embeddings"
        ),
        # Such as the layers of speculative heads that the engine does not run.
        pytest.param(
            {
                f"{PREFIX}mtp.layers.0.q_proj.lora_A.weight": torch.ones(2, 2),
                "mtp.norm.weight": torch.ones(2),
            },
            ["mtp."],
            id="what is under skipped prefixes, whatever it holds",
        ),
    ],
)
def test_is_left_out(others, skip_prefixes):
    assert_modules(from_tensors({**others, **good_tensors()}, skip_prefixes=skip_prefixes), WIDTHS.keys())


@pytest.mark.lab("1.6")
def test_an_adapter_without_weights_is_refused():
    """Such as one whose modules are all left out."""
    helper = PEFTHelper.from_dict(good_config(), LORA_EXTENSIONS)
    for tensors, prefixes in (({}, None), (good_tensors(), ["model."])):
        with pytest.raises(ValueError):
            pair_up(tensors, helper, skip_prefixes=prefixes)
        assert refusal(tensors, skip_prefixes=prefixes) not in ("", "None"), "the error says nothing"


@pytest.mark.lab("1.6")
def test_all_are_judged_before_one_is_converted():
    tensors = good_tensors()
    last = next(reversed(tensors))
    tensors[last] = tensors[last] * float("nan")

    with Conversions() as converted, pytest.raises(ValueError):
        from_tensors(tensors, dtype=torch.float64)

    assert not converted.shapes, f"the last tensor was NaN, and others were converted: {converted.shapes}"


class Conversions(TorchFunctionMode):
    """Notes the shapes of the matrices that are converted."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("to", "type", "double", "float", "half", "bfloat16") and args[0].ndim > 1:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.lab("1.6")
def test_weights_go_to_the_device_asked_for():
    """On the device "meta", which has shapes only, as a stand-in for a GPU."""
    lora = from_tensors(good_tensors(), device="meta")

    assert {tensor.device.type for m in WIDTHS for tensor in lora.loras[m].tensors} == {"meta"}


@pytest.mark.lab("1.6")
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_shapes_alone_are_neither_judged_nor_converted(device):
    """To move them to a CPU would raise: there are no numbers."""
    tensors = {name: tensor.to("meta") for name, tensor in good_tensors().items()}

    lora = from_tensors(tensors, device=device, dtype=torch.float64)

    assert_modules(lora, WIDTHS.keys())
    assert {tensor.device.type for m in WIDTHS for tensor in lora.loras[m].tensors} == {"meta"}


@pytest.mark.lab("1.6")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, None])
def test_weights_come_in_the_dtype_asked_for_or_keep_their_own(dtype):
    stored = torch.float32 if dtype else torch.float16

    lora = from_tensors(good_tensors(stored), dtype=dtype)

    assert {tensor.dtype for m in WIDTHS for tensor in lora.loras[m].tensors} == {dtype or stored}


def test_an_adapter_is_looked_up_by_module():
    lora = from_tensors(good_tensors(), adapter_id=5)

    assert lora.id == 5
    assert lora.rank == RANK
    assert lora.get_lora(V) is lora.loras[V]
    assert lora.get_lora("model.layers.9.mlp.up_proj") is None
    assert lora.check_lora_name(DOWN) and not lora.check_lora_name("down_proj")
    assert lora.nbytes == 4 * sum(RANK * (width_in + width_out) for width_in, width_out in WIDTHS.values())


@pytest.mark.parametrize("adapter_id", [0, -3])
def test_an_id_below_1_is_refused(adapter_id):
    with pytest.raises(ValueError, match=f"greater than 0, got {adapter_id}"):
        LoRAModel(adapter_id, 4, {})


def test_a_clone_shares_the_tensors_and_nothing_that_changes():
    lora = from_tensors(good_tensors(), adapter_id=5)

    clone = lora.clone(6)
    clone.loras.pop(Q)

    assert (clone.id, clone.rank) == (6, RANK)
    assert clone.loras[V].lora_a is lora.loras[V].lora_a
    assert lora.check_lora_name(Q)


def test_no_two_loads_have_the_same_identity():
    """Names and ids come back with other weights; caches of results are keyed by this."""
    tensors = good_tensors()
    first, second = from_tensors(tensors), from_tensors(tensors)

    assert len({first.load_id, second.load_id, first.clone(1).load_id}) == 3


def test_writing_over_the_file_does_not_change_an_adapter_that_is_loaded(tmp_path):
    """A trainer that saves into the folder it saved into before."""
    folder = write(tmp_path / "adapter")
    loaded = load(folder)
    before = {m: (lora.lora_a.clone(), lora.lora_b.clone()) for m, lora in loaded.loras.items()}
    file = folder / "adapter_model.safetensors"

    with open(file, "r+b") as opened:  # in place: no new file under the old name
        size = file.stat().st_size
        opened.seek(size // 2)
        opened.write(b"\x11" * (size - size // 2))

    for module, (lora_a, lora_b) in before.items():
        assert torch.equal(loaded.loras[module].lora_a, lora_a)
        assert torch.equal(loaded.loras[module].lora_b, lora_b)


def test_a_bin_file_of_tensors_is_read_like_safetensors(tmp_path):
    expected = load(write(tmp_path / "safe"))
    folder = write(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in good_tensors().items()}

    for name in ("adapter_model.pt", "adapter_model.bin"):
        torch.save(parameters, folder / name)
        lora = load(folder)
        (folder / name).unlink()

        for module in WIDTHS:
            assert torch.equal(lora.loras[module].lora_a, expected.loras[module].lora_a)
            assert torch.equal(lora.loras[module].lora_b, expected.loras[module].lora_b)
            assert not lora.loras[module].lora_b.requires_grad


def test_safetensors_are_preferred_to_a_pickle_beside_them(tmp_path):
    folder = write(tmp_path / "adapter")
    torch.save({name: tensor + 1 for name, tensor in good_tensors().items()}, folder / "adapter_model.bin")

    lora = load(folder)

    assert torch.equal(lora.loras[Q].lora_a, good_tensors()[f"{PREFIX}{Q}.lora_A.weight"])


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_shapes_alone_can_be_read_without_the_numbers(weights, tmp_path):
    folder = write(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    save = save_file if weights.endswith(".safetensors") else torch.save
    save(good_tensors(torch.bfloat16), folder / weights)

    lora = load(folder, shapes_only=True)

    for module, (width_in, width_out) in WIDTHS.items():
        assert lora.loras[module].lora_a.is_meta and lora.loras[module].lora_b.is_meta
        assert lora.loras[module].lora_a.shape == (RANK, width_in)
        assert lora.loras[module].lora_b.shape == (width_out, RANK)
