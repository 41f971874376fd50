"""vLLM's path to a module of the arithmetic, see the folder above."""
