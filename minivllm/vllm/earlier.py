"""Signatures of earlier versions of vLLM (0.6 to 0.10) that documents still show, over today's.

`import minivllm.vllm` brings them under the paths that these versions had, such as `minivllm.lora.models`. What a
keyword asks for that is not so here is refused; a keyword that says what holds anyway is taken.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from minivllm import assembly
from minivllm.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig
from minivllm.lora import lora_model, model_manager
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.text.prompts import load_tokenizer
from minivllm.vllm.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
from minivllm.vllm.model_manager import create_lora_manager as create_manager
from minivllm.vllm.worker_manager import LRUCacheWorkerLoRAManager as WorkerManager
from minivllm.worker import lora_model_runner_mixin

__all__ = [
    "LLMEngine",
    "LRUCacheLoRAModelManager",
    "LRUCacheWorkerLoRAManager",
    "LoRAModel",
    "LoRAModelManager",
    "LoRAModelRunnerMixin",
    "create_lora_manager",
    "get_lora_id",
]

_ids = itertools.count(1)


def get_lora_id() -> int:
    """An adapter id that this function has not given before. vLLM: the same name."""
    return next(_ids)


def refuse_what_differs(**given: object) -> None:
    """ValueError for a keyword that has a value: there is nothing here that would do what it asks for."""
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} has no meaning here, got {value!r}; leave it out")


def config_of(
    max_num_seqs: int, max_num_batched_tokens: int, vocab_size: int, lora_config: LoRAConfig
) -> SimpleNamespace:
    """The parts of a `vllm_config` that managers of adapters read."""
    return SimpleNamespace(
        lora_config=lora_config,
        model_config=SimpleNamespace(get_vocab_size=lambda: vocab_size),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
    )


class LRUCacheWorkerLoRAManager(WorkerManager):
    """vLLM: the same name, whose constructor took each part of the configuration by itself.

    embedding_modules, embedding_padding_modules, max_position_embeddings   the model itself says them here
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        lora_config: LoRAConfig,
        device: torch.device | str,
        embedding_modules: dict[str, str] | None = None,
        embedding_padding_modules: list[str] | None = None,
        max_position_embeddings: int | None = None,
    ) -> None:
        super().__init__(config_of(max_num_seqs, max_num_batched_tokens, vocab_size, lora_config), device)


def create_lora_manager(
    model: nn.Module,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    lora_config: LoRAConfig,
    device: torch.device | str,
    lora_manager_cls: type[model_manager.LRUCacheLoRAModelManager] = LoRAModelManager,
    embedding_modules: dict[str, str] | None = None,
    embedding_padding_modules: list[str] | None = None,
    max_position_embeddings: int | None = None,
) -> model_manager.LRUCacheLoRAModelManager:
    """A manager for a model, which it wraps; the last three as of `LRUCacheWorkerLoRAManager`. vLLM: the same name."""
    return create_manager(
        model,
        max_num_seqs,
        max_num_batched_tokens,
        vocab_size,
        lora_config,
        None,
        device,
        lora_manager_cls=lora_manager_cls,
    )


class LoRAModel(lora_model.LoRAModel):
    """vLLM: the same name, whose adapters had ids given to them and brought embeddings beside their tensors.

    target_embedding_padding, embedding_modules, embedding_padding_modules   the model itself says them here
    embeddings, tensorizer_config_dict   refused: files of an adapter's folder are read by the options that know them
    """

    @classmethod
    def from_lora_tensors(
        cls,
        lora_model_id: int,
        tensors: dict[str, torch.Tensor],
        peft_helper: PEFTHelper,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        embeddings: dict[str, torch.Tensor] | None = None,
        target_embedding_padding: int | None = None,
        embedding_modules: dict[str, str] | None = None,
        embedding_padding_modules: list[str] | None = None,
        **options: Any,
    ) -> lora_model.LoRAModel:
        refuse_what_differs(embeddings=embeddings)
        return lora_model.LoRAModel.from_lora_tensors(
            lora_model_id, tensors, peft_helper, device, dtype, **options
        )

    @classmethod
    def from_local_checkpoint(
        cls,
        lora_dir: str,
        expected_lora_modules: list[str],
        peft_helper: PEFTHelper,
        *,
        lora_model_id: int | None = None,
        target_embedding_padding: int | None = None,
        embedding_modules: dict[str, str] | None = None,
        embedding_padding_modules: list[str] | None = None,
        tensorizer_config_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> lora_model.LoRAModel:
        refuse_what_differs(tensorizer_config_dict=tensorizer_config_dict)
        return lora_model.LoRAModel.from_local_checkpoint(
            lora_dir,
            expected_lora_modules,
            peft_helper,
            lora_model_id=get_lora_id() if lora_model_id is None else lora_model_id,
            **options,
        )


class LoRAModelRunnerMixin(lora_model_runner_mixin.LoRAModelRunnerMixin):
    """vLLM: the same name, whose `load_lora_model` took each part of the configuration by itself."""

    def load_lora_model(
        self,
        model: nn.Module,
        model_config: Any,
        scheduler_config: Any,
        lora_config: LoRAConfig,
        device: torch.device | str,
    ) -> nn.Module:
        config = config_of(
            scheduler_config.max_num_seqs,
            scheduler_config.max_num_batched_tokens,
            model_config.get_vocab_size(),
            lora_config,
        )
        return super().load_lora_model(model, config, device)


class LLMEngine(assembly.LLMEngine):
    """vLLM: the same name, whose constructor took each part of the configuration by itself; today's form does, too.

    device_config   "auto", "cpu", "cuda" or "cuda:N"
    """

    def __init__(
        self,
        *config: Any,
        model_config: ModelConfig | None = None,
        cache_config: CacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        lora_config: LoRAConfig | None = None,
        device_config: str = "auto",
        **options: Any,
    ) -> None:
        if model_config is not None:
            parts = cache_config or CacheConfig(), scheduler_config or SchedulerConfig(), lora_config
            whole = EngineConfig(model_config, *parts, device=device_config)
            config = (whole, load_tokenizer(model_config))
        super().__init__(*config, **options)
