"""The engine in a process or a thread of its own, for callers in event loops. vLLM: vllm/v1/engine/async_llm.py.

Brings      `AsyncLLM`: streams, and adapters that are read beside the steps instead of by them. Beside steps two at a
            time were read in 26.6 ms each, 63.3 a second (benchmarks/README.md,
            reads-beside-known-layouts-cpu-2026-11-23.json)
Implements  `LLMEngine` is stepped by a loop of its own; `AdapterSource.why_wait` has requests wait until their
            adapter was read, and one of the engine's `listeners` tells steps
Costs       some 2,100 lines; one process more, which imports PyTorch again, and a pickle of each order and each
            step's outputs. Memory over hours is in docs/serving.md
"""
