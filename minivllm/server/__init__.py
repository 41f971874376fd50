"""Serving over HTTP. Stands for vllm/entrypoints/openai (v0.22.1)."""
