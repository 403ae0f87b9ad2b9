"""Delivery of a streamed document: a change is delivered when every reader was sent it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

from serve.state.versioned_watch import Revision


def reader_of(revision: Revision) -> AsyncGenerator[bytes, None]:
    async def line() -> tuple[int, bytes]:
        return revision.number, str(revision.number).encode()

    return cast("AsyncGenerator[bytes, None]", revision.stream(line))


async def test_a_change_is_delivered_when_every_reader_was_sent_it() -> None:
    revision = Revision()
    assert await revision.delivered(0.0)
    readers = [reader_of(revision) for _ in range(3)]
    assert [await anext(reader) for reader in readers] == [b"1"] * 3
    revision.bump()
    delivered = asyncio.create_task(revision.delivered(60.0))
    seen = [await anext(reader) for reader in readers]
    assert seen == [b"2"] * 3
    # A server asks for the next line once it has written the last one.
    asked = [asyncio.ensure_future(anext(reader)) for reader in readers[:2]]
    await asyncio.sleep(0)
    assert not delivered.done()
    asked.append(asyncio.ensure_future(anext(readers[2])))
    assert await delivered
    for each in asked:
        each.cancel()
    await asyncio.wait(asked)


async def test_a_reader_that_takes_nothing_delays_delivery_until_the_timeout_or_its_end() -> None:
    revision = Revision()
    reader = reader_of(revision)
    await anext(reader)
    assert not await revision.delivered(0.01)
    delivered = asyncio.create_task(revision.delivered(60.0))
    await asyncio.sleep(0)
    await reader.aclose()
    assert await delivered
