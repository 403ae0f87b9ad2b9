"""Requests go to fake replicas by frames, and in ``make test-all`` by HTTP too."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.worker import Stack


@pytest.fixture(scope="module", params=["frames", pytest.param("http", marks=pytest.mark.long)])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, way: str) -> AsyncIterator[Stack]:
    """One worker with its controller for a whole module, as elsewhere, for each way."""
    stack = Stack(tmp_path_factory.mktemp("gateway"))
    stack.gateway["replica_protocol"] = way
    await stack.start_controller()
    await stack.start_worker()
    yield stack
    await stack.close()
