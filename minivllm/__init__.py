"""minivllm: multi-LoRA serving as vLLM's V1 engine does it, small enough to read in a weekend."""
