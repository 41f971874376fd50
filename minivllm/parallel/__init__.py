"""A model spread over processes: who has which part of it, and how they put parts together. vLLM: vllm/distributed."""
