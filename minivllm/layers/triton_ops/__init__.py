"""The model's own GPU kernels, in Triton. Stands for vllm/csrc (v0.22.1)."""
