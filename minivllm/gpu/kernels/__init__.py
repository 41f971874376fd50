"""Kernels over pages. Beside vllm/lora/ops/triton_ops (v0.22.1), whose slots are of one size."""
