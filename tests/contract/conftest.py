"""A Ray head of the tests' own, for all contracts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray_head import RayHead, ray_head


@pytest.fixture(scope="package")
def ray_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    with ray_head(tmp_path_factory.mktemp("ray")) as head:
        yield head
