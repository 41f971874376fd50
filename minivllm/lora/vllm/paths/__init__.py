"""vLLM's paths to modules that lie elsewhere here: `minivllm.lora.utils` is found as `utils` in this folder.

`minivllm.lora` and `minivllm.lora.ops` look here for what they lack. Stands for files of vllm/lora/ (v0.22.1).
"""
