"""One gateway worker for the tests of a file, and a separate model for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.harness import Harness


@pytest.fixture(scope="module", params=["frames", pytest.param("http", marks=pytest.mark.long)])
def way(request: pytest.FixtureRequest) -> str:
    """How requests go to replicas; ``make test-all`` tests the rows on both."""
    return str(request.param)


@pytest.fixture(scope="module")
def gateway(request: pytest.FixtureRequest, way: str) -> dict[str, Any]:
    """The ``gateway`` section of the document: ``GATEWAY`` of the file, where its rows need one."""
    return {**getattr(request.module, "GATEWAY", {}), "replica_protocol": way}


@pytest.fixture(scope="module")
def tests(request: pytest.FixtureRequest) -> int:
    """The number of tests in the file."""
    return sum(item.path == request.path for item in request.session.items)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(
    tmp_path_factory: pytest.TempPathFactory, gateway: dict[str, Any], tests: int
) -> AsyncIterator[Harness]:
    harness = Harness(tmp_path_factory.mktemp("faults"), gateway, tests=tests)
    await harness.start_controller()
    await harness.start_worker()
    yield harness
    await harness.close()


@pytest_asyncio.fixture(loop_scope="module")
async def harness(worker: Harness) -> AsyncIterator[Harness]:
    yield worker
    await worker.clear()


@pytest.fixture
def model(harness: Harness) -> str:
    return harness.fresh_model()
