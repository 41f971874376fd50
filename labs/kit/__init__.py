"""What makes and grades the labs. `minivllm/labs.py` is the part of it that the engine knows."""
