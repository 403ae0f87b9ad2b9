"""Follows the KV events that an engine publishes on a ZeroMQ socket, and asks again for those that it missed.

An engine that was restarted begins to count again. So what is asked for after a gap, or after the connection
was down, begins with the last batch that is known: another one in its place is another log. The protocol is
that of vLLM's ``ZmqEventPublisher`` (0.32): frames (topic, number, payload), and a socket that repeats them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from policy.routing.kv_event_log import KvEventLog

# vLLM looks for requests for old batches ten times a second.
REPLAY_S = 2.0
# A subscription takes effect when the publisher has it, which is not told: usually and at the latest.
SUBSCRIBED_S, SUBSCRIBED_MS = 0.1, 2_000
# Of one batch. A step of 32,768 tokens is 0.3 MB; more ends the connection, unread.
MAX_BATCH_BYTES = 2 * 1024 * 1024
# Batches that wait to be read. Then the publisher keeps them, or drops some, which are asked for again.
MAX_WAITING = 10_000
# A host that is gone closes no connection.
HEARTBEAT_MS, DEAD_MS, CONNECT_MS = 5_000, 15_000, 5_000
RECONNECT_MS, MAX_RECONNECT_MS = 100, 5_000
# An engine publishes at every step, and to be woken costs more than to read: what comes within this time is
# read together, in turns of so many batches.
REST_S = 0.02
MOST_IN_A_TURN = 16


class KvEventSubscriber:
    """Keeps ``log`` at what is published at ``endpoint``; it is ``current`` while connected.

    ``changed`` is called when either may have changed. The endpoints are ZeroMQ's, such as ``tcp://HOST:PORT``.
    It ends by itself once the events are not supported.
    """

    def __init__(
        self, log: KvEventLog, endpoint: str, replay_endpoint: str | None, changed: Callable[[], None]
    ) -> None:
        self.log = log
        self.current = False
        self._changed = changed
        self._replay_endpoint = replay_endpoint
        self._live = -1
        # Whether the log may be that of another process than the one that publishes now.
        self._unchecked = True
        self._taking = asyncio.Lock()
        context = zmq.asyncio.Context.instance()
        # Not one of asyncio, which would wake the loop for each batch.
        self.socket: zmq.Socket[bytes] = zmq.Context(context).socket(zmq.SUB)
        _configure(self.socket)
        self.socket.subscribe(b"")
        monitored = f"inproc://kv-events-{_descriptor(self.socket)}"
        self.socket.monitor(monitored, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.connect(monitored)
        self.socket.connect(endpoint)
        self._replay: zmq.asyncio.Socket | None = None
        self._tasks = [
            asyncio.create_task(self._follow(), name="KV events"),
            asyncio.create_task(self._watch(), name="connection of KV events"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.current = False
        asyncio.get_running_loop().remove_reader(_descriptor(self.socket))
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)
        self._close_replay()

    @property
    def error(self) -> BaseException | None:
        """What ended the subscription, if something did."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return next((error for task in ended if (error := task.exception()) is not None), None)

    def check(self) -> None:
        """Raise what ended the subscription."""
        if (error := self.error) is not None:
            raise error

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.current = False
            self._changed()

    async def _follow(self) -> None:
        socket = self.socket
        while not self.log.unsupported:
            await _arrival(socket)
            left = MOST_IN_A_TURN
            while _has_message(socket) and not self.log.unsupported:
                async with self._taking:
                    await self._take(*_batch(socket.recv_multipart(zmq.NOBLOCK)))
                left -= 1
                if not left:
                    left = MOST_IN_A_TURN
                    await asyncio.sleep(0)
            self._changed()
            await asyncio.sleep(REST_S)

    async def _watch(self) -> None:
        """Compare the log when a connection begins: a quiet engine publishes nothing that shows a gap."""
        settling = False
        while not self.log.unsupported:
            if settling and not await self._monitor.poll(SUBSCRIBED_MS):
                settling = False
                async with self._taking:
                    await self._catch_up()
                self._changed()
                continue
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await asyncio.sleep(SUBSCRIBED_S)
                async with self._taking:
                    await self._catch_up()
                self.current = settling = True
            else:
                self.current, settling, self._unchecked, self._live = False, False, True, -1
            self._changed()

    async def _take(self, number: int, payload: bytes) -> None:
        went_back = number <= self._live
        if self._unchecked or went_back or number > self.log.next:
            await self._catch_up()
            if went_back and self._replay_endpoint is None:
                self.log.restart()
        self._live = number
        self.log.take(number, payload)

    async def _catch_up(self) -> None:
        """Take what was missed, as far as the publisher still has it; a new log is taken from its begin."""
        self._unchecked = False
        same = None if self._replay_endpoint is None else await self._replayed(self._replay_endpoint)
        if same is False:
            self.log.restart()
            same = await self._replayed(str(self._replay_endpoint))
        if same is None and not self.log.next:
            self.log.index.lossy = True  # what came before is not known

    async def _replayed(self, endpoint: str) -> bool | None:
        """Take the batches from the last known one on; false if that is another there, ``None`` in doubt."""
        log = self.log
        compared = not log.next
        same = True
        if self._replay is None:
            self._replay = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            _configure(self._replay)
            self._replay.connect(endpoint)
        await self._replay.send_multipart([b"", max(log.next - 1, 0).to_bytes(8)])
        while True:
            try:
                async with asyncio.timeout(REPLAY_S):
                    frames = await self._replay.recv_multipart()
            except TimeoutError:
                self._close_replay()  # its late answers are not those to the next request
                return None if same else False
            number, payload = _batch(frames)
            if not payload:  # the end
                return same and compared
            if not compared:
                compared = True
                same = number >= log.next or log.is_last(number, payload)
            if same:
                log.take(number, payload)
            await asyncio.sleep(0)

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(0)
            self._replay = None


def _configure(socket: zmq.Socket[Any]) -> None:
    for option, value in (
        (zmq.IPV6, 1),
        (zmq.LINGER, 0),
        (zmq.RCVHWM, MAX_WAITING),
        (zmq.MAXMSGSIZE, MAX_BATCH_BYTES),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, DEAD_MS),
        (zmq.CONNECT_TIMEOUT, CONNECT_MS),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS),
    ):
        socket.setsockopt(option, value)


async def _arrival(socket: zmq.Socket[bytes]) -> None:
    """Wait until ``socket`` has a message. Its descriptor shows that something has happened."""
    loop, descriptor = asyncio.get_running_loop(), _descriptor(socket)
    while not _has_message(socket):
        happened = asyncio.Event()
        loop.add_reader(descriptor, happened.set)
        try:
            await happened.wait()
        finally:
            if not socket.closed:  # then the descriptor may be another's
                loop.remove_reader(descriptor)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _batch(frames: list[bytes]) -> tuple[int, bytes]:
    """Number and payload of a message, whose topic older versions leave out; no payload of a wrong one."""
    with contextlib.suppress(ValueError):
        *_, number, payload = frames
        return int.from_bytes(number[:8]), payload
    return 0, b""
