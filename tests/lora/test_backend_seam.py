"""A backend may put A and B wherever it likes: a layer must not notice, nor a whole model.

Three backends compute the same thing from slots in three places: where the layer made them, scattered over
one tensor for all layers, and as the last rows of a copy of the base weight.
"""

import pytest
import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.wrapping import WrappedModules
from minivllm.models.registry import get_model
from tests.oracles.backends import NaivePunica, backends
from tests.oracles.peft import greedy_tokens, load_oracle, reference_logits
from tests.worlds.adapters import ADAPTERS, save_adapter
from tests.worlds.linears import DTYPE, ToyModel, toy_adapter, wrap
from tests.worlds.models import SIZES, PagedRequests, save_base, token_ids

BACKENDS = list(backends(DTYPE))
SLOT_OF = {"mlp": 0, "qv": 1, "patterns": 2, "all": 3, "base": -1}
NEW_TOKENS = 6


@pytest.fixture(params=BACKENDS)
def backend(request):
    return backends(DTYPE)[request.param]


def outputs_of(layer, x, token_slots):
    layer.punica_wrapper.token_slot_list = token_slots
    return layer(x)[0]


def assert_same_outputs(ours, reference, seed):
    """Both models' layers on random rows that mix all slots and the base."""
    generator = torch.Generator().manual_seed(seed)
    for name, layer in ours.modules.items():
        x = torch.randn(7, layer.input_size, dtype=DTYPE, generator=generator)
        slots = torch.randint(-1, 3, (7,), generator=generator).tolist()
        expected = outputs_of(reference.modules[name], x, slots)
        torch.testing.assert_close(outputs_of(layer, x, slots), expected, rtol=1e-12, atol=1e-12)


def test_outputs_do_not_depend_on_where_the_slots_are(backend):
    ours, reference = wrap(ToyModel(), backend), wrap(ToyModel(), NaivePunica())
    generator = torch.Generator().manual_seed(0)

    for seed in range(20):
        slot = int(torch.randint(3, (), generator=generator))
        rank = int(torch.randint(1, 9, (), generator=generator))
        modules = None if seed % 3 else ["attn.v_proj", "mlp.gate_proj", "router"]
        for wrapped in (ours, reference):
            lora = toy_adapter(seed, modules, rank)
            wrapped.accept(lora)
            wrapped.write(lora, slot)

        assert_same_outputs(ours, reference, seed)


@pytest.mark.parametrize("backend", ["scattered", "tail rows"])
def test_a_backend_that_takes_over_later_takes_what_the_slots_hold(backend):
    ours, reference = wrap(ToyModel(), NaivePunica()), wrap(ToyModel(), NaivePunica())
    for wrapped in (ours, reference):
        for slot in range(3):
            lora = toy_adapter(slot, rank=2 + slot)
            wrapped.accept(lora)
            wrapped.write(lora, slot)

    successor = backends(DTYPE)[backend]
    for layer in ours.modules.values():
        layer.set_mapping(successor)

    assert_same_outputs(ours, reference, seed=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Llama and four adapters for it, as folders."""
    root = tmp_path_factory.mktemp("tiny")
    base = save_base(root / "base", dtype=torch.float64)
    adapters = {
        name: save_adapter(root / name, base, seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    return base, {**adapters, "base": None}


@pytest.fixture(scope="module")
def texts():
    return {
        name: token_ids(length, seed) for seed, (name, length) in enumerate(zip(SLOT_OF, (13, 5, 9, 1, 7)))
    }


@pytest.fixture(scope="module")
def answers(folders, texts):
    """Of transformers + PEFT, one adapter at a time: greedy tokens, and logits of the text with them."""
    base, adapters = folders
    tokens, logits = {}, {}
    for name, text in texts.items():
        oracle = load_oracle(base, adapters[name])
        tokens[name] = greedy_tokens(oracle, text, NEW_TOKENS)
        logits[name] = reference_logits(oracle, text + tokens[name], torch.float64)
    return tokens, logits


def wrapped_llama(folders, backend):
    """The same model in minivllm, each adapter in its slot."""
    base, adapters = folders
    model = get_model(base, torch.float64)
    wrapped = WrappedModules(model, LoRAConfig(max_lora_rank=12, max_loras=4), backend, LORA_EXTENSIONS)
    endings = [name.rpartition(".")[2] for name in wrapped.claims]
    for name, slot in SLOT_OF.items():
        if adapters[name] is not None:
            folder = str(adapters[name])
            peft_helper = PEFTHelper.from_local_dir(folder)
            lora = LoRAModel.from_local_checkpoint(folder, endings, peft_helper, lora_model_id=slot + 1)
            wrapped.accept(lora)
            wrapped.write(lora, slot)
    return model


def greedy_batch(model, backend, texts):
    """All texts in one batch: whole prompts, then token by token; tokens and logits of each."""
    requests = PagedRequests(model, [list(text) for text in texts.values()])
    names, logits = list(texts), [[] for _ in texts]
    for step in range(NEW_TOKENS + 1):
        rows = [len(text) if step == 0 else 1 for text in texts.values()]
        backend.token_slot_list = [SLOT_OF[name] for name, n in zip(names, rows) for _ in range(n)]
        for row, row_logits in enumerate(requests.step(list(enumerate(rows)))):
            logits[row].append(row_logits)
            requests.texts[row].append(int(row_logits[-1].argmax()))
    tokens = {name: text[len(texts[name]) : -1] for name, text in zip(names, requests.texts)}
    return tokens, {name: torch.cat(pieces) for name, pieces in zip(names, logits)}


def test_a_whole_model_answers_as_transformers_and_peft_do(folders, texts, answers, backend):
    expected_tokens, expected_logits = answers
    model = wrapped_llama(folders, backend)

    tokens, logits = greedy_batch(model, backend, texts)

    assert tokens == expected_tokens
    for name, expected in expected_logits.items():
        assert expected.shape == logits[name].shape == (len(texts[name]) + NEW_TOKENS, SIZES["vocab_size"])
        assert (logits[name] - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_the_adapters_of_that_model_change_its_answers(folders, texts, answers):
    base = load_oracle(folders[0])
    for name, logits in answers[1].items():
        without = reference_logits(base, texts[name] + answers[0][name], torch.float64)
        moved = (logits - without).abs().max()
        assert moved > 0.1 * without.abs().max() if name != "base" else moved == 0
