"""The subscriber of KV events against a double of vLLM's publisher: gaps, restarts, hostile messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from policy.hashing import block_keys
from policy.routing.engine_prefix_index import KvBlockIndex
from policy.routing.kv_event_log import KvEventLog
from store.kv_events import subscriber as kv_event_subscriber
from store.kv_events.subscriber import KvEventSubscriber
from tests.serve.sim_driver import until
from tests.store.kv_events.publisher import Publisher, publishing, stored

BLOCK = 4
TOKENS = list(range(100, 124))


def finds(subscriber: KvEventSubscriber) -> int:
    return subscriber.log.index.tokens_of(block_keys(TOKENS, BLOCK))[0]


@asynccontextmanager
async def following(publisher: Publisher, *, replay: bool = True) -> AsyncIterator[KvEventSubscriber]:
    address = "tcp://127.0.0.1:"
    subscriber = KvEventSubscriber(
        KvEventLog(KvBlockIndex(0)),
        f"{address}{publisher.port}",
        f"{address}{publisher.replay_port}" if replay else None,
        lambda: None,
    )
    await until(lambda: subscriber.current)
    try:
        yield subscriber
        subscriber.check()
    finally:
        subscriber.close()
    await until(lambda: not any("KV events" in task.get_name() for task in asyncio.all_tasks()))


async def test_what_was_published_before_is_asked_for() -> None:
    async with publishing() as publisher:
        await publisher.publish(stored([1, 2], TOKENS[:8], BLOCK))
        async with following(publisher) as subscriber:
            assert finds(subscriber) == 8
            await publisher.publish(stored([3], TOKENS[8:12], BLOCK, 2), lost=True)
            await publisher.publish(stored([4], TOKENS[12:16], BLOCK, 3))
            await until(lambda: finds(subscriber) == 16)
            assert (subscriber.log.lost, subscriber.log.index.lossy) == (0, False)


async def test_what_the_publisher_has_no_longer_is_lost() -> None:
    async with publishing(buffer_steps=1) as publisher:
        for number in range(3):
            await publisher.publish(stored([number], [number] * BLOCK, BLOCK))
        async with following(publisher) as subscriber:
            assert (subscriber.log.lost, subscriber.log.index.lossy) == (2, True)
        async with following(publisher, replay=False) as subscriber:
            assert subscriber.log.index.lossy


@pytest.mark.slow
async def test_an_engine_that_was_restarted_holds_nothing_however_far_it_has_counted() -> None:
    for batches in (0, 2, 5):
        async with publishing() as publisher:
            for at in range(2):
                await publisher.publish(stored([at], TOKENS[4 * at :][:4], BLOCK, at - 1 if at else None))
            async with following(publisher) as subscriber:
                assert finds(subscriber) == 8
                await publisher.stop()
                await until(lambda: not subscriber.current)
                publisher.start()
                for _ in range(batches):
                    await publisher.publish(stored([9], TOKENS[:4], BLOCK))
                await until(lambda: subscriber.current)
                assert finds(subscriber) == (4 if batches else 0)
                assert subscriber.log.next == batches
                assert not subscriber.log.index.lossy


async def test_hostile_messages_end_nothing() -> None:
    async with publishing() as publisher:
        async with following(publisher) as subscriber:
            await publisher.send(b"\xc1")
            await publisher.pub.send_multipart([b"alone"])
            await publisher.pub.send_multipart([b"", b"", b"", b"\xff" * 100, b"x"])
            await until(lambda: subscriber.log.malformed > 0)
            await publisher.send(bytes(kv_event_subscriber.MAX_BATCH_BYTES + 1))
            await until(lambda: not subscriber.current)
        await publisher.stop()
        publisher.start()
        async with following(publisher) as subscriber:
            await publisher.publish(stored([1], TOKENS[:4], BLOCK))
            await until(lambda: finds(subscriber) == 4)
