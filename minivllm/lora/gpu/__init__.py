"""What only a GPU needs: slots laid out for kernels, copies beside a step. See vllm/lora/punica_wrapper/."""
