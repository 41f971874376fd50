"""`python -m minivllm` is the command `minivllm`."""

from minivllm.cli import main

if __name__ == "__main__":
    main()
