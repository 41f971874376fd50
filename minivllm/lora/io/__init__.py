"""Where adapters come from beside a local folder of safetensors: the hub, resolvers, pickles. See vllm/lora/."""
