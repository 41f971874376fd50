"""One model on several ranks: processes with a GPU each, or a part of the CPU's cores. vLLM: vllm/distributed.

Brings      on two H200, Llama-8B shape in bfloat16: 1.52 to 1.58 times the tokens a second of one
            (docs/tensor-parallel.md, engine-decode-tp2-ends-rank16-h200-2026-11-23.json), and room for models that
            one GPU cannot hold. A part of that is `peers`, sums in each other's memory
Implements  `minivllm.layers.ranks.Ranks`, which layers are given: `TensorParallel` overrides all of it. And the
            engine's `Executor`: `LeadingExecutor` has every rank run each step
Options     `tensor_parallel_size`, `disable_custom_all_reduce`
Costs       some 1,400 lines, and 690 in `peers`; two sums over all ranks a layer; one process more for each rank to
            start and to watch, each with its share of the model
"""

from typing import TYPE_CHECKING

from minivllm.extension import Extension

if TYPE_CHECKING:
    from minivllm.parts import Parts


def _add_to(parts: "Parts") -> None:
    if parts.config.parallel_config.tensor_parallel_size > 1:
        from minivllm.parallel.leader import start_ranks

        parts.make_executor = start_ranks


PARALLEL = Extension(add_to=_add_to)
