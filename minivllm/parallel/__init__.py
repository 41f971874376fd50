"""One model on several ranks: processes with a GPU each, or a part of the CPU's cores. vLLM: vllm/distributed.

Brings   on two H200, for an 8B model in bfloat16, 1.5 to 1.6 times the tokens a second of one (docs/tensor-parallel.md
         has the figures), and room for models that one GPU cannot hold
Seams    `minivllm.layers.ranks.Ranks`, which layers are given: `TensorParallel` overrides all of it. And the engine's
         `Executor`: the one here has every rank run each step. `minivllm.assembly` chooses both
Costs    two sums over all ranks a layer, and one process more for each rank to start and to watch
"""

from minivllm.engine.extension import Extension, Parts


def _add_to(parts: Parts) -> None:
    if parts.config.parallel_config.tensor_parallel_size > 1:
        from minivllm.parallel.leader import start_ranks

        parts.make_executor = start_ranks


PARALLEL = Extension(add_to=_add_to)
