"""What a test compares with, none of which is the code that it tests.

peft          transformers with PEFT's adapters on it, in float64 (`Oracle`), or quantized
merged        the weights that PEFT merges
recorded      what both have answered once: exercises are checked without importing them
toy_backend   the arithmetic of adapters row by row in float64; backends: the same, with A and B in other places
tiers         where adapters are, in memory and in slots, as plain lists
scheduler     who is in a step, from the rules alone
invariants    what must hold of an engine between any two calls
rows          two tensors, compared row by row, in words
"""
