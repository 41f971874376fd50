"""vLLM's further names and signatures (v0.22.1, vllm/lora/) over ours; nothing inside imports them."""

import minivllm.lora.vllm.layer_names
import minivllm.lora.vllm.weight_names  # noqa: F401
