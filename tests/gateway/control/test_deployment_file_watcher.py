"""The deployment in the state directory, which is read again when it changes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import resource
from collections.abc import Iterator
from pathlib import Path

from gateway.control.deployment_file_watcher import LOOK_EVERY_S, DeploymentWatcher
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import Deployment
from store.state_dir import StateDir
from tests.gateway.virtual_time import run_virtual

LOOKS_S = 4 * LOOK_EVERY_S


@contextlib.contextmanager
def no_file_descriptors() -> Iterator[None]:
    """No file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_document_that_could_not_be_read_is_read_at_a_later_look(tmp_path: Path) -> None:
    """It counted as read, and the one before stayed in force until the next change."""
    state, stream = StateDir(tmp_path), io.StringIO()

    def save(*names: str) -> None:
        models = [{"name": name, "engine": "external", "urls": ["http://h:1"]} for name in names]
        state.save(state.deployment_path, {"models": models})

    async def main() -> None:
        save("alpha")
        watcher, taken = DeploymentWatcher(state, StructuredLog(0, stream)), list[Deployment]()
        follow = asyncio.create_task(watcher.follow(taken.append))
        save("alpha", "beta")
        with no_file_descriptors():
            await asyncio.sleep(LOOKS_S)
        assert not taken
        await asyncio.sleep(LOOKS_S)
        assert [[spec.name for spec in each.models] for each in taken] == [["alpha", "beta"]]
        save()
        await asyncio.sleep(LOOKS_S)
        assert watcher.deployment is taken[0]
        follow.cancel()

    run_virtual(main)
    logged = stream.getvalue()
    events = ("document_unreadable", "document_read", "document_refused")
    assert [logged.count(f'"{event}"') for event in events] == [1, 1, 1]
