"""Wrapped layers: a base layer each, with slots for adapters. Stands for vllm/lora/layers/ (v0.22.1)."""
