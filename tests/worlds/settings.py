"""Engines with room and engines in need, in which an extension's adapters answer beside all others."""

SETTINGS = {
    "plenty of everything": {"max_loras": 6, "max_cpu_loras": 12},
    "one slot": {"max_loras": 1, "max_cpu_loras": 1},
    "loops": {"max_loras": 3, "punica_backend": "loops"},
    "chunks of 5 tokens": {"max_loras": 4, "max_num_batched_tokens": 5, "max_num_seqs": 4},
    "few blocks": {"num_kv_blocks": 32, "max_loras": 3, "max_num_batched_tokens": 24},
    "no prefix cache": {"max_loras": 3, "enable_prefix_caching": False, "block_size": 8},
    "short turns": {"max_lora_wait_steps": 1, "max_num_seqs": 3, "max_num_batched_tokens": 16},
}
