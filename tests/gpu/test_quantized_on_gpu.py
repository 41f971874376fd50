"""A base model in int8 on a GPU: PEFT's tokens, bfloat16 through CUDA graphs as good as PEFT's, and little memory."""

import pytest
import torch

from minivllm import LLM, LoRARequest
from minivllm.gpu.pages.backend import PagedBackend
from minivllm.models.registry import get_model
from tests.oracles.peft import dequantized_oracle, quantized_names, quantized_oracle, stored_bytes
from tests.tools.device import DEVICE, needs_cuda
from tests.worlds.demo import NAMES, adapter_folder, demo_base, task_prompts
from tests.worlds.engines import greedy, run, tiny_world, tokens_of
from tests.worlds.models import token_ids, transformers_model

pytest.importorskip("torchao")

NUM_TOKENS = 24
LIKELIEST = 20


@needs_cuda
def test_float32_gives_the_tokens_of_peft_on_the_same_int8_weights(tmp_path_factory):
    world = tiny_world(tmp_path_factory)
    pairs = [
        (name, token_ids(5 + 4 * number, number)) for number, name in enumerate([None, *world.names, None])
    ]

    engine = world.engine(device=DEVICE, dtype="float32", quantization="torchao")
    for number, (name, prompt) in enumerate(pairs):
        engine.add_request(str(number), prompt, greedy(8), lora_request=world.request(name))
    outputs = run(engine)

    folders = {name: world.path(name) for name in world.names}
    oracle = dequantized_oracle(engine.runner.model, world.base, folders)
    backend = engine.adapters.manager.punica_wrapper
    assert isinstance(backend, PagedBackend)
    for number, (name, prompt) in enumerate(pairs):
        assert tokens_of(outputs[str(number)]) == oracle.greedy(name, prompt, 8), name


@needs_cuda
def test_bfloat16_in_cuda_graphs_is_as_close_to_float32_as_transformers_and_peft():
    base, pairs = demo_base(), task_prompts(2)
    llm = LLM(
        base,
        device=DEVICE,
        dtype="bfloat16",
        quantization="torchao",
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=4,
        max_lora_rank=32,
        max_model_len=512,
        num_kv_blocks=600,
    )
    loras = {name: LoRARequest(name, i, str(adapter_folder(name))) for i, name in enumerate(NAMES, 1)}

    outputs = llm.generate(
        [prompt for _, prompt in pairs],
        greedy(NUM_TOKENS, ignore_eos=False, logprobs=LIKELIEST),
        use_tqdm=False,
        lora_request=[name and loras[name] for name, _ in pairs],
    )

    assert llm.llm_engine.runner.graphs.hold_most_steps
    folders = {name: adapter_folder(name) for name in NAMES}
    oracles = {dtype: quantized_oracle(base, folders, dtype) for dtype in (torch.float32, torch.bfloat16)}
    ours, theirs = [], []
    for (name, _), output in zip(pairs, outputs, strict=True):
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        exact, peft = (
            oracle.logits(name, [prompt + completion.token_ids])[0, len(prompt) - 1 : -1]
            .float()
            .log_softmax(-1)
            for oracle in oracles.values()
        )
        for row, exact_row, peft_row in zip(completion.logprobs, exact, peft, strict=True):
            ids = list(row)
            ours.append((torch.tensor([row[i].logprob for i in ids]) - exact_row[ids]).abs())
            theirs.append((peft_row - exact_row)[ids].abs())
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    print(
        f"mean error {ours.mean():.4f} ours, {theirs.mean():.4f} PEFT; largest {ours.max():.3f}, {theirs.max():.3f}"
    )
    assert ours.mean() <= 1.1 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()


@needs_cuda
def test_the_gpu_never_holds_more_than_one_weight_in_full(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24}
    transformers_model("llama-llama3-rope", **sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    model = get_model(tmp_path, torch.bfloat16, DEVICE, quantization="torchao")

    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    weights = [model.get_parameter(name) for name in quantized_names(model)]
    in_full = sum(2 * weight.numel() for weight in weights)
    stored = sum(map(stored_bytes, weights))
    print(f"linears: {in_full:,} bytes in bfloat16, {stored:,} in int8; {held:,} held, {peak:,} at the peak")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
    assert 0.5 * in_full < stored < 0.52 * in_full
    assert stored < held < 0.55 * in_full
    assert peak < 0.8 * in_full
