"""What each `minivllm` command does; cli.py has their options.

Brings      demo, generate, serve, inspect, simulate, trace-page and bench, with `--json` beside every table
Implements  nothing of the engine's: it calls what Python callers do
Costs       some 1,300 lines; each command imports its own file when it is called, so `minivllm --help` needs no
            PyTorch. `demo` without --tiny (examples/demo.py) and `bench cpu` (benchmarks/cpu.py) need the repository
"""
