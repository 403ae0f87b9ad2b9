"""A Ray head of the tests' own, for all contracts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_head import RayHead, ray_head

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests on the shared head last in this folder: the others start Ray themselves.

    `tidegate up` refuses to start a second Ray cluster on a machine.
    """
    places = [at for at, item in enumerate(items) if FOLDER in item.path.parents]
    own = sorted((items[at] for at in places), key=_is_on_the_head)
    for at, item in zip(places, own, strict=True):
        items[at] = item


def _is_on_the_head(item: pytest.Item) -> bool:
    return item.path.parent == FOLDER / "actuators" or "ray_site" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="package")
def ray_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    with ray_head(tmp_path_factory.mktemp("ray")) as head:
        yield head
