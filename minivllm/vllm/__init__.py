"""vLLM's further names, signatures and paths (v0.22.1, vllm/lora/) over ours: `import minivllm.vllm` brings them.

Short aliases that readers of vLLM expect stand in our classes themselves. What is here are subclasses and functions of
vLLM's that nothing of ours uses, and modules that lie elsewhere here. No class of ours changes by the import.

After it `minivllm.lora.utils`, `.punica_wrapper` with its modules, `.ops.torch_ops` and `.resolver`, `minivllm.v1`,
`minivllm.config.lora` and `minivllm.engine.arg_utils` can be imported, and `minivllm.lora.layers` has all of vLLM's
layers. What only earlier versions had (`minivllm.lora.models`, `.lora`) leads to `minivllm.vllm.earlier`. Where Triton
is missing, so are `.punica_gpu` and `.ops.triton_ops`. The core's managers serve plain adapters unless they are given
extensions; vLLM's, which serve all, are in `minivllm.vllm.model_manager` and `.worker_manager`.

Brings      code and tests that are written for vLLM's paths; nothing is faster for it
Implements  `Backend` in vLLM's form (`PunicaWrapperBase` and its kinds)
Costs       some 900 lines, and nothing where it is not imported
"""

import importlib.util
import sys

import minivllm.config
import minivllm.core.scheduler
import minivllm.engine_args
import minivllm.lora.lora_weights
import minivllm.sources.resolver
from minivllm.vllm import (
    earlier,
    layers,
    model_manager,
    punica_selector,
    punica_wrapper,
    torch_ops,
    utils,
    worker_manager,
)

__all__ = ["earlier", "layers", "model_manager", "punica_selector", "torch_ops", "utils", "worker_manager"]

# vLLM's path -> where its names are.
PATHS = {
    "minivllm.lora.utils": utils,
    "minivllm.lora.punica_wrapper": punica_selector,
    "minivllm.lora.ops.torch_ops": torch_ops,
    "minivllm.lora.resolver": minivllm.sources.resolver,
    "minivllm.lora.punica_wrapper.punica_base": punica_wrapper,
    "minivllm.lora.punica_wrapper.punica_cpu": punica_wrapper,
    "minivllm.lora.punica_wrapper.punica_selector": punica_selector,
    **{
        f"minivllm.lora.layers.{name}": layers
        for name in (
            *("base_linear", "column_parallel_linear", "row_parallel_linear", "replicated_linear"),
            *("fused_moe", "vocal_parallel_embedding", "logits_processor"),
        )
    },
    "minivllm.config.lora": minivllm.config,
    "minivllm.engine.arg_utils": minivllm.engine_args,
    "minivllm.v1.engine": earlier,
    "minivllm.v1.engine.llm_engine": earlier,
    "minivllm.v1.core.sched.scheduler": minivllm.core.scheduler,
    # Of earlier versions.
    "minivllm.lora.models": earlier,
    "minivllm.lora.lora": minivllm.lora.lora_weights,
    "minivllm.lora.punica_wrapper.punica_wrapper": punica_selector,
    "minivllm.v1.worker.lora_model_runner_mixin": earlier,
}
if importlib.util.find_spec("triton"):
    from minivllm.gpu import sgmv
    from minivllm.vllm import punica_gpu

    PATHS |= {
        "minivllm.lora.punica_wrapper.punica_gpu": punica_gpu,
        "minivllm.lora.ops.triton_ops": sgmv,
        "minivllm.lora.ops.triton_ops.lora_expand_op": sgmv.lora_expand_op,
        "minivllm.lora.ops.triton_ops.lora_kernel_metadata": sgmv.lora_kernel_metadata,
        "minivllm.lora.ops.triton_ops.lora_shrink_op": sgmv.lora_shrink_op,
    }
sys.modules.update(PATHS)
