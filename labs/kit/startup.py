"""Whoever imports this before minivllm runs the learners' code that MINIVLLM_LABS selects (labs.kit.overlay)."""

from labs.kit.overlay import install_from_environment

install_from_environment()
