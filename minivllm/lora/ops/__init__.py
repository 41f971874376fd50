"""The arithmetic of LoRA rows: shrink (x·Aᵀ) and expand (·Bᵀ)."""

# vLLM's `torch_ops`.
__path__.append(f"{__path__[0]}/../vllm/paths/ops")
