"""The arithmetic of LoRA rows: shrink (x·Aᵀ) and expand (·Bᵀ)."""
