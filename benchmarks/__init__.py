"""Speed of the engine and of its multi-LoRA layers. README.md says how to run what, and what a number means."""
