"""An endpoint to replay against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tidegate.replay.endpoint import Endpoint


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A simulated engine called ``base`` with the adapter ``sql``, whose steps take no time."""
    endpoint = Endpoint()
    with endpoint.served():
        yield endpoint
