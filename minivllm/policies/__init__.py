"""Who is kept, who goes first, what is read ahead, which engine gets a request. vLLM (v0.22.1) has one answer each."""

from minivllm.engine.extension import Extension, Parts


def _add_to(parts: Parts) -> None:
    from minivllm.policies.install import add_to

    add_to(parts)


POLICIES = Extension(add_to=_add_to)
