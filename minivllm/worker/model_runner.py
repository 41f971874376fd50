"""One model on one device, its KV cache and its adapters. Stands for vllm/v1/worker/gpu_model_runner.py (v0.22.1)."""

import torch

from minivllm.config import EngineConfig
from minivllm.distributed.alone import ALONE
from minivllm.distributed.tensor_parallel import TensorParallel
from minivllm.layers.sampler import Sampler
from minivllm.models.registry import get_model
from minivllm.worker.cpu_threads import cpu_threads
from minivllm.worker.cuda_graphs import DecodeGraphs
from minivllm.worker.elastic_memory import ElasticMemory
from minivllm.worker.gpu_memory import refuse_slots_that_do_not_fit
from minivllm.worker.prefetch import AdapterPrefetch
from minivllm.worker.row_sampler import RowSampler
from minivllm.worker.steps_ahead import StepsAhead
from minivllm.worker.warm_up import WarmUp


class ModelRunner(ElasticMemory, StepsAhead, WarmUp, AdapterPrefetch):
    """One model on one device, its KV cache, and its adapters. vLLM: `GPUModelRunner`.

    num_blocks      KV blocks there are, block 0 included, which is never handed out
    decode_graphs   captured decode steps, once `capture_model` has run; None = every step runs eagerly
    """

    def __init__(self, config: EngineConfig, tp: TensorParallel = ALONE) -> None:
        self.config = config
        self.device = config.device
        model_config = config.model_config
        self.on_gpu = torch.device(self.device).type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(torch.device(self.device).index or 0)  # Triton launches on the current one
        self.use_paged_attention = self.on_gpu and model_config.dtype in (torch.float16, torch.bfloat16)
        self.decode_graphs: DecodeGraphs | None = None
        self.cpu_threads = cpu_threads(config)
        with self.cpu_threads.in_use():
            self.model = get_model(
                model_config.model,
                model_config.dtype,
                self.device,
                load_format=model_config.load_format,
                seed=model_config.seed,
                quantization=model_config.quantization,
                batch_invariant=model_config.batch_invariant,
                tp=tp,
            )
            if config.lora_config is not None:
                refuse_slots_that_do_not_fit(config, tp)
                self.model = self.load_lora_model(self.model, config, self.device)
            self.sampler = Sampler(model_config.architecture.eos_token_ids, model_config.seed)
            self.row_sampler = RowSampler(self.sampler)
            self.num_blocks = self._num_kv_blocks()
            self._allocate_kv_cache(self.num_blocks)
        rows = config.scheduler_config.max_num_seqs
        self.cpu_threads.measure_on(self.model, rows, model_config.dtype)
