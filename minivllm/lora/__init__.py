"""Multi-LoRA: book A of the core. Stands for vllm/lora/ (v0.22.1)."""
