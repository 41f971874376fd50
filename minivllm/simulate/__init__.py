"""The engine's own scheduler and adapters on a virtual clock, where steps cost what was measured. Nothing of vLLM's.

Brings      answers for traffic and hardware that are not at hand: 32 adapters in pages on an H100 at 32 requests a
            second were foretold within 0.1 % of their tokens a second, 2.0 % of the median first token and 3.4 % of
            its 99th percentile; 2,000 adapters within 1.5, 2.7 and 15.5 % (docs/simulate.md: of 20)
Implements  `ModelRunner`'s place is taken by a cost model; `Scheduler`, `AdapterTiers` and policies are the engine's
            own
Costs       some 1,600 lines, and no time of an engine that does not simulate
"""
