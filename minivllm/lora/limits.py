"""How much of an adapter is read at all. vLLM has no such limits: vllm/lora/peft_helper.py reads what is there.

An adapter comes from anybody. Each limit is far above what trainers write, and far below what hurts. So a refusal
takes less than a second and less than 256 MB.
"""

# PEFT writes 1 KB, and 100 bytes for each entry of a list of targets or of a pattern.
CONFIG_BYTES = 2**20

# An adapter of each expert of Qwen3-235B-A22B has 72,192 tensors: 94 layers, 128 experts, 3 linears, A and B.
MOST_TENSORS = 100_000
# 150 bytes a tensor and room for more; the library `safetensors` stops at 100 MB.
HEADER_BYTES = 16 * 2**20
# 70 characters are usual. Checks of names, above all by regular expressions, take time for each character.
LONGEST_TENSOR_NAME = 512
MOST_DIMENSIONS = 8
