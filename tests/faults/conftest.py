"""One gateway worker for the rows of a file, and a model of its own for each row."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.stand import Stand


@pytest.fixture(scope="module")
def gateway(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The ``gateway`` section of the document: ``GATEWAY`` of the file, where its rows need one."""
    return dict(getattr(request.module, "GATEWAY", {}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory, gateway: dict[str, Any]) -> AsyncIterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("faults"), gateway)
    await stand.start_controller()
    await stand.start_worker()
    yield stand
    await stand.close()


@pytest_asyncio.fixture(loop_scope="module")
async def stand(worker: Stand) -> AsyncIterator[Stand]:
    yield worker
    await worker.clear()


@pytest.fixture
def model(stand: Stand) -> str:
    return stand.fresh_model()
