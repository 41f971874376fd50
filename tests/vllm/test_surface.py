"""SURFACE.md as a table: every name of it is there, and is called as it says.

What the names do is checked elsewhere, each against an oracle that is not ours.
"""

import ast
import importlib
import inspect

import pytest

import minivllm.vllm  # noqa: F401


def attributes(names):
    return dict.fromkeys(names.split())


LAYER = {
    "create_lora_weights": "max_loras, lora_config, model_config=None",
    "reset_lora": "index",
    "set_lora": "index, lora_a, lora_b",
    "set_mapping": "punica_wrapper",
    "can_replace_layer": "source_layer, lora_config, packed_modules_list, model_config=None",
    "slice_lora_a": "lora_a",
    "slice_lora_b": "lora_b",
}
LAYERS = [
    "BaseLayerWithLoRA",
    "ColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "QKVParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "RowParallelLinearWithLoRA",
    "ReplicatedLinearWithLoRA",
    "VocabParallelEmbeddingWithLoRA",
    "FusedMoEWithLoRA",
    "FusedMoE3DWithLoRA",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
    "ColumnParallelLinearWithShardedLoRA",
    "MergedColumnParallelLinearWithShardedLoRA",
    "QKVParallelLinearWithShardedLoRA",
    "MergedQKVParallelLinearWithShardedLoRA",
    "RowParallelLinearWithShardedLoRA",
]
PUNICA = {
    "update_metadata": "mapping, lora_index_to_id, max_loras, vocab_size",
    "add_shrink": "y, x, lora_a_stacked, scale",
    "add_expand": "y, x, lora_b_stacked, output_slices, offset_start=0, add_inputs=True",
    "add_lora_embedding": "y, x, lora_b_stacked, add_inputs=True",
    "add_lora_linear": "y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None",
    "add_lora_logits": "y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None",
}
MANAGER = {
    "": "model, max_num_seqs, max_num_batched_tokens, vocab_size, lora_config, device, vllm_config=None",
    "add_adapter": "adapter",
    "activate_adapter": "lora_id",
    "deactivate_adapter": "adapter_id",
    "remove_adapter": "adapter_id",
    "remove_all_adapters": "",
    "pin_adapter": "lora_id",
    "list_adapters": "",
    "get_adapter": "adapter_id",
    "set_adapter_mapping": "mapping",
    "create_dummy_lora": "lora_id, rank, embedding_modules=None",
    "get_free_slots": "",
    "get_memory_stats": "",
    "get_lora_info": "adapter_id",
    "list_active_adapters": "",
    **attributes("lora_index_to_id modules capacity lora_slots"),
}
WORKER = {
    "create_lora_manager": "model",
    "set_active_adapters": "requests, mapping",
    "add_adapter": "lora_request",
    "remove_adapter": "adapter_id",
    "pin_adapter": "adapter_id",
    "list_adapters": "",
    "add_dummy_lora": "lora_request, rank",
}
BGMV = "inputs, {}_weights, output_tensor, lora_indices_tensor"
SGMV = "inputs, {}_weights, output_tensor, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, "
SGMV += "max_seq_length, token_nums"

# Module -> what is in it. A class has its methods, "" being its constructor; a function its parameters.
# A parameter with "..." for its default may have any; parameters past those named must all have one.
SURFACE = {
    "lora.request": {
        "LoRARequest": {
            "": "lora_name, lora_int_id, lora_path, *, load_inplace=False",
            **attributes("name adapter_id path"),
        },
    },
    "lora.peft_helper": {
        "PEFTHelper": {
            "from_dict": "config_dict",
            "from_local_dir": "lora_path, max_position_embeddings",
            "validate_legal": "lora_config",
            **attributes("r lora_alpha use_rslora vllm_lora_scaling_factor"),
        }
    },
    "lora.lora_weights": {
        "LoRALayerWeights": {
            "": "module_name, rank, lora_alpha, lora_a, lora_b, scaling=None",
            "optimize": "",
            "from_config": "module_name, peft_helper",
            "create_dummy_lora_weights": "module_name, input_dim, output_dim, rank, dtype, device",
            **attributes("input_dim output_dim is_packed"),
        },
        "PackedLoRALayerWeights": {
            "": "module_name, rank, lora_alphas, lora_a, lora_b, scaling=None",
            "optimize": "",
            "pack": "loras",
            "pack_moe": "loras, module_name, is_non_gated_moe=False",
        },
    },
    "lora.lora_model": {
        "LoRAModel": {
            "": "lora_model_id, rank, loras",
            "get_lora": "module_name",
            "clone": "lora_model_id",
            "check_lora_name": "lora_name",
            "from_lora_tensors": "lora_model_id, tensors, peft_helper, device=..., dtype=None, "
            "model_vocab_size=None, weights_mapper=None, skip_prefixes=None",
            "from_local_checkpoint": "lora_dir, expected_lora_modules, peft_helper, *, lora_model_id, "
            "device=..., dtype=None, model_vocab_size=None, weights_mapper=None, skip_prefixes=None",
        }
    },
    "lora.utils": {
        "parse_fine_tuned_lora_name": "name, weights_mapper=None",
        "is_base_embedding_weights": "name",
        "replace_submodule": "model, module_name, new_module",
        "from_layer": "layer, max_loras, lora_config, packed_modules_list, model_config=None",
        "from_layer_logits_processor": "layer, lm_head, max_loras, lora_config, model_config=None",
        "get_supported_lora_modules": "model",
        "is_supported_lora_module": "module_name, supported_lora_modules",
        "is_in_target_modules": "module_name, target_modules, packed_modules_mapping=None",
        "get_adapter_absolute_path": "lora_path",
    },
    "lora.layers": {
        **{name: {"": "base_layer", **LAYER} for name in LAYERS},
        "LogitsProcessorWithLoRA": {
            "": "base_layer, hidden_size, dtype, device, sharded_to_full_mapping",
            **LAYER,
            "_get_logits": "hidden_states, lm_head, embedding_bias=None",
        },
        "LoRAMapping": {"": "index_mapping, prompt_mapping, is_prefill=False, type=LoRAMappingType.LANGUAGE"},
        "LoRAMappingType": attributes("LANGUAGE"),
    },
    "lora.punica_wrapper": {
        "PunicaWrapperABC": PUNICA,
        "PunicaWrapperBase": {"": "max_num_batched_tokens, max_batches, device", **PUNICA},
        "PunicaWrapperCPU": {"": "max_num_batched_tokens, max_batches, device", **PUNICA},
        "get_punica_wrapper": "max_num_batched_tokens, max_batches, device, *, lora_config=...",
        "convert_mapping": "mapping, lora_index_to_id, max_loras, vocab_size, extra_vocab_size, device",
    },
    "lora.punica_wrapper.punica_gpu": {"PunicaWrapperGPU": PUNICA},
    "lora.ops.torch_ops": {
        "bgmv_shrink": f"{BGMV.format('lora_a')}, scaling=1.0",
        "bgmv_expand": f"{BGMV.format('lora_b')}, add_inputs=True",
        "bgmv_expand_slice": f"{BGMV.format('lora_b')}, slice_offset, slice_size, add_inputs=True",
        "sgmv_shrink": f"{SGMV.format('lora_a')}, scaling",
        "sgmv_expand": f"{SGMV.format('lora_b')}, add_inputs=False",
        "sgmv_expand_slice": f"{SGMV.format('lora_b')}, slice_offset, slice_size, add_inputs=False",
    },
    "lora.ops.triton_ops": {
        "LoRAKernelMeta": {
            "make": "max_loras, max_num_tokens, device, captured_lora_counts=None",
            "prepare_tensors": "token_lora_mapping",
            "meta_args": "token_nums, specialize_active_lora=...",
        },
        "lora_shrink": "inputs, lora_a_weights, output, *, scaling",
        "lora_expand": "inputs, lora_b_weights, output, *, offset_start=0, add_inputs=False",
    },
    "lora.model_manager": {
        "LoRAModelManager": MANAGER,
        "LRUCacheLoRAModelManager": {**MANAGER, "remove_oldest_adapter": ""},
        "create_lora_manager": "model, max_num_seqs, max_num_batched_tokens, vocab_size, lora_config, "
        "vllm_config, device, lora_manager_cls=...",
    },
    "lora.worker_manager": {
        "WorkerLoRAManager": {"": "vllm_config, device, embedding_modules=...", **WORKER},
        "LRUCacheWorkerLoRAManager": {"": "vllm_config, device, embedding_modules=...", **WORKER},
    },
    "worker.lora_model_runner_mixin": {
        "LoRAModelRunnerMixin": {
            "load_lora_model": "model, vllm_config, device",
            "set_active_loras": "input_batch, num_scheduled_tokens, num_sampled_tokens=None",
            "maybe_dummy_run_with_lora": "lora_config, num_scheduled_tokens, num_sampled_tokens",
            "add_lora": "lora_request",
            "remove_lora": "lora_id",
            "pin_lora": "lora_id",
            "list_loras": "",
        }
    },
    "worker.input_batch": {
        "InputBatch": {"make_lora_inputs": "num_scheduled_tokens, num_sampled_tokens"},
    },
    "core.scheduler": {
        "Scheduler": {
            "schedule": "",
            "update_from_output": "...",
            "add_request": "request",
            "finish_requests": "request_ids, ...",
        },
    },
    "lora.resolver": {
        "LoRAResolver": {"resolve_lora": "base_model_name, lora_name"},
        "LoRAResolverRegistry": {
            "register_resolver": "resolver_name, resolver",
            "get_resolver": "resolver_name",
            "get_supported_resolvers": "",
        },
    },
    "config": {
        "LoRAConfig": {
            "": "max_lora_rank=16, max_loras=1, max_cpu_loras=None, *, lora_dtype=..., target_modules=None, "
            "fully_sharded_loras=False, bias_enabled=False, lora_extra_vocab_size=0, "
            "long_lora_scaling_factors=None"
        },
    },
    "": {
        "EngineArgs": {
            "": "model, *, enable_lora=False, max_loras=None, max_lora_rank=16, max_cpu_loras=None, dtype='auto', "
            "device='auto', max_model_len=None, max_num_seqs=..., max_num_batched_tokens=..., seed=0"
        },
        "LLM": {
            "": "model, **options",
            "generate": "prompts, sampling_params=None, *, use_tqdm=True, lora_request=None",
            "chat": "messages, ...",
        },
        "LLMEngine": {"debug_info": ""},
        "SamplingParams": {"": "*, temperature=..., max_tokens=..."},
        "RequestOutput": attributes("request_id outputs"),
        "CompletionOutput": attributes("text token_ids finish_reason"),
    },
    "engine.llm_engine": {
        "LLMEngine": {
            "from_engine_args": "args",
            "add_request": "request_id, prompt, params, arrival_time=None, lora_request=None",
            "step": "",
            "abort_request": "request_ids",
            "has_unfinished_requests": "",
            "add_lora": "lora_request",
            "remove_lora": "lora_id",
            "pin_lora": "lora_id",
            "list_loras": "",
        }
    },
    "models.interfaces": {"SupportsLoRA": attributes("packed_modules_mapping embedding_modules")},
    # What vLLM never had.
    "lora.events": {"LoRAStats": attributes("hit_rate evictions load_seconds activate_seconds")},
    "engine.metrics": {"EngineMetrics": attributes("forward_seconds")},
}


def flat(surface):
    """(module, name, member, signature) of everything; member "" for what is called by its own name."""
    for module, names in surface.items():
        for name, members in names.items():
            for member, signature in members.items() if isinstance(members, dict) else [("", members)]:
                yield pytest.param(
                    module, name, member, signature, id=".".join(filter(None, [module, name, member]))
                )


def find(module, name, member):
    owner = getattr(importlib.import_module(f"minivllm.{module}".rstrip(".")), name)
    if member in getattr(owner, "__dataclass_fields__", {}):
        return owner.__dataclass_fields__[member]
    return getattr(owner, member) if member else owner


def parameters_of(text):
    """("name", kind, default or None) of each parameter in the text of a signature, and whether there may be more."""
    may_be_more = "..." in text.split(", ")
    names = [piece for piece in text.split(", ") if piece != "..."]
    arguments = ast.parse(f"def f({', '.join(names)}): pass").body[0].args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    plain = [(a.arg, "by place", d) for a, d in zip(arguments.args, defaults)]
    named = [(a.arg, "by name", d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return plain + named, may_be_more


def assert_called_as(function, text):
    found = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    by_name = {p.name: p for p in found}
    wanted, may_be_more = parameters_of(text)
    for place, (name, kind, default) in enumerate(wanted):
        assert name in by_name, f"no parameter {name}; it takes {inspect.signature(function)}"
        if kind == "by place":
            assert found[place].name == name, f"parameter {place} is {found[place].name}, expected {name}"
        if default is not None and ast.unparse(default) != "...":
            assert_same_default(by_name[name].default, ast.unparse(default), name)
    if not may_be_more:
        names = [name for name, *_ in wanted]
        more = [
            p.name
            for p in found
            if p.name not in names and p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        # What `*meta` stands for in the Triton ops.
        assert not set(more) - {"rows", "tiles", "count", "block_rows"}, f"{more} must be given, too"


def assert_same_default(found, expected, name):
    assert str(found) == expected or repr(found) == expected, (
        f"{name} is {found!r} by default, not {expected}"
    )


@pytest.mark.parametrize(("module", "name", "member", "signature"), flat(SURFACE))
def test_a_name_of_the_surface_is_there_and_called_as_it_says(module, name, member, signature):
    thing = find(module, name, member)

    if signature is not None and signature != "...":
        assert_called_as(thing, signature)
