"""The engine's own scheduler and caches on a virtual clock: what many adapters would do. vLLM (v0.22.1) has none."""
