"""Tests, a folder for each folder of minivllm, and `phase_NN` for what grades the course.

worlds    how a test gets a model, adapters, an engine, a server
oracles   what it compares with
tools     what looks at code, at memory, at a process from outside; most can be run by themselves

`make test` runs files in the order of their names. `make test-random` draws an order of files and of the tests in them,
which it prints as a seed; ORDER=<seed> repeats it.
"""
