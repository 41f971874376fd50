"""What an engine tells of itself."""

from minivllm.engine.extension import Extension, Parts


def _add_to(parts: Parts) -> None:
    from minivllm.observe.install import add_to

    add_to(parts)


OBSERVE = Extension(add_to=_add_to)
