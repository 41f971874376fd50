"""Engines with room and engines in need, in which an extension's adapters answer beside all others."""

from tests.tools.nights import without_gpu_at_night

SETTINGS = {
    "plenty of everything": {"max_loras": 6, "max_cpu_loras": 12},
    "one slot": {"max_loras": 1, "max_cpu_loras": 1},
    "loops": {"max_loras": 3, "punica_backend": "loops"},
    "chunks of 5 tokens": {"max_loras": 4, "max_num_batched_tokens": 5, "max_num_seqs": 4},
    "few blocks": {"num_kv_blocks": 32, "max_loras": 3, "max_num_batched_tokens": 24},
    "no prefix cache": {"max_loras": 3, "enable_prefix_caching": False, "block_size": 8},
    "short turns": {"max_lora_wait_steps": 1, "max_num_seqs": 3, "max_num_batched_tokens": 16},
}
# Those of adapters that are more than A's and B's of linears.
OF_OPTIONS = {
    "plenty of everything": {"max_loras": 6, "max_cpu_loras": 6},
    "one slot": {"max_loras": 1, "max_cpu_loras": 1},
    "two slots, chunks of 5 tokens": {"max_loras": 2, "max_num_batched_tokens": 5, "max_num_seqs": 4},
    "few blocks": {"max_loras": 3, "num_kv_blocks": 14, "max_num_batched_tokens": 24},
}

# Backend -> how far off logits may be, as a share of the largest: kernels compute in float32 whatever the dtype.
BACKENDS = {"loops": 1e-10, "grouped": 1e-10, "triton": 1e-5, "paged": 1e-5}
# Kernels through Triton's interpreter, which tests/gpu has at work elsewhere, run at night.
EACH_BACKEND = without_gpu_at_night(("loops", "grouped"), "triton", "paged")
