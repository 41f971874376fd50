"""Options of adapters, each in a file of its own; a plain adapter enters none. vLLM: inside vllm/lora/."""
