"""Adapters and KV blocks on one budget: the scheduler's side. vLLM divides memory once, when it starts."""
