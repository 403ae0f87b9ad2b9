"""Stacks of real gateway workers and fake replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.gateway.worker import Stack


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """Nothing started yet."""
    stack = Stack(tmp_path)
    yield stack
    await stack.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: object) -> AsyncIterator[Stack]:
    """One worker with its controller for a whole module; each test sets its own fleet."""
    stack = Stack(tmp_path_factory.mktemp("gateway"))  # type: ignore[attr-defined]
    await stack.start_controller()
    await stack.start_worker()
    yield stack
    await stack.close()
