"""Adapters in pages, in memory that they share with the KV cache. In vLLM 0.22.1 all slots have one size.

A slot is a row of a table, and takes as many pages as its adapter has ranks. In the order of an engine's life:
kv_and_pages.py divides memory; pool.py lays pages out in it for all layers (slots.py, two_step_slots.py); ledger.py
says which slot has which. The scheduler's side (scheduler.py, admission.py, block_pool.py) and the adapters'
(manager.py) decide who gets pages and who gives them back. writer.py fills them, and backend.py launches the kernels
that read them.
"""
