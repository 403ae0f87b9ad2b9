"""One Ray head for all contracts of actuators: a process joins one in its life, for Ray keeps its token."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from serve.ray_cluster import join
from tests.ray_head import RayHead, ray_head


@pytest.fixture(scope="package")
def ray_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    with ray_head(tmp_path_factory.mktemp("ray")) as head:
        yield head


@pytest.fixture(scope="package")
def ray_joined(ray_site: RayHead) -> Iterator[tuple[str, str]]:
    assert "ray" not in sys.modules, "Ray reads its token mode when it is loaded: join before importing it"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
            patch.delenv(name, raising=False)
        before = dict(os.environ)
        yield join(ray_site.deployment, ray_site.state)
        import ray  # noqa: PLC0415 - only what asks for Ray loads it

        ray.shutdown()
        for name in set(os.environ) - set(before):
            del os.environ[name]
