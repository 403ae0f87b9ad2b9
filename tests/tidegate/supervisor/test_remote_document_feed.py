"""What a host follows of a controller elsewhere: a deployment that cannot be stored is stored later."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from policy.errors import Unreachable
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tests.serve.sim_documents import document
from tidegate.deployment_file import DeploymentDocument
from tidegate.supervisor import remote_document_feed
from tidegate.supervisor.remote_document_feed import RemoteDocumentFeed


async def test_a_document_that_a_full_disk_refuses_is_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_document_feed, "FOLLOW_EVERY_S", 0.0)
    first, second = document(), document(cluster={"controller": "127.0.0.1:7071"})
    answers: list[Any] = [first, second, OSError(errno.EMFILE, "too many open files"), second, second, first]
    notes: list[str] = []
    taken: list[object] = []

    def answer(client: ControllerClient) -> dict[str, Any]:
        if not answers:
            raise Unreachable("the end")
        if isinstance(found := answers.pop(0), Exception):
            raise found
        return found  # type: ignore[no-any-return]

    def take(found: DeploymentDocument) -> None:
        taken.append(found.raw)
        if len(taken) < 3:
            raise OSError(errno.ENOSPC, "no space left on device")

    def note(text: str) -> None:
        notes.append(text)
        if "the end" in text:
            following.cancel()

    monkeypatch.setattr(ControllerClient, "document", answer)
    feed = RemoteDocumentFeed(StateDir(tmp_path), "127.0.0.1:1", None)
    following = asyncio.ensure_future(feed.follow(first, take, note))
    async with asyncio.timeout(60):
        await asyncio.wait([following])
    # Stored at the third try; a change after that is taken too.
    assert taken == [second, second, second, first]
    full = "the new deployment file cannot be stored: [Errno 28] no space left on device"
    assert [text for text in notes if "stored" in text] == [full]
    assert any("too many open files" in text for text in notes)
