"""The engine in a process or a thread of its own, for callers in event loops. vLLM: vllm/v1/engine/async_llm.py.

Brings      `AsyncLLM`: streams, and adapters that are read concurrently with steps instead of by them. Two at a time
            took 26.6 ms each, 63.3 a second, while steps went on (benchmarks/README.md,
            reads-beside-known-layouts-cpu-2026-11-23.json)
Implements  `LLMEngine` is stepped by a thread of its own; `AdapterSource.read_ahead` has requests wait until their
            adapter has been read, and one of the engine's `listeners` reports steps
Costs       some 2,100 lines; one process more, which imports PyTorch again, and pickling of each request and each
            step's outputs. Memory over hours is in docs/serving-measured.md
"""
