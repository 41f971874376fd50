"""vLLM's further names, signatures and paths (v0.22.1, vllm/lora/) over ours: `import minivllm.vllm` brings them.

Short aliases that readers of vLLM expect stand in our classes themselves. What is here are subclasses and functions of
vLLM's that nothing of ours uses, and modules that lie elsewhere here. No class of ours changes by the import.

After it `minivllm.lora.utils`, `.punica_wrapper`, `.punica_wrapper.punica_gpu`, `.ops.torch_ops` and `.resolver` can be
imported, and `minivllm.lora.layers` has all of vLLM's layers. Where Triton is missing, so are `.punica_gpu` and
`.ops.triton_ops`. The core's managers serve plain adapters unless they are given extensions; vLLM's, which serve all,
are in `minivllm.vllm.model_manager` and `.worker_manager`.

Brings      code and tests that are written for vLLM's paths; nothing is faster for it
Implements  `Backend` in vLLM's form (`PunicaWrapperBase` and its kinds)
Costs       some 700 lines, and nothing where it is not imported
"""

import importlib.util
import sys

import minivllm.sources.resolver
from minivllm.vllm import layers, model_manager, punica_selector, torch_ops, utils, worker_manager

__all__ = ["layers", "model_manager", "punica_selector", "torch_ops", "utils", "worker_manager"]

# vLLM's path -> where its names are.
PATHS = {
    "minivllm.lora.utils": utils,
    "minivllm.lora.punica_wrapper": punica_selector,
    "minivllm.lora.ops.torch_ops": torch_ops,
    "minivllm.lora.resolver": minivllm.sources.resolver,
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
