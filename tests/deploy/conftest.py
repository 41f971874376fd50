"""A Ray for the tests that need one."""

import pytest


@pytest.fixture(scope="module")
def ray():
    """A Ray of two CPUs, until the last test of a file has ended."""
    ray = pytest.importorskip("ray", reason="not verified here: needs Ray (make serve-ray installs it)")
    from deploy.fleet.__main__ import start_ray

    start_ray(cpus=2)
    yield ray
    ray.shutdown()
