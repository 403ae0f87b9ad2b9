"""Connections are accepted a few in a turn and shared among workers; no error of one closes the port."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.http.acceptor import MARGIN, MOST_IN_A_TURN, Acceptor
from tests.gateway.worker import until


class Listening:
    """A listening socket whose accept() fails with the given errors."""

    def __init__(self) -> None:
        self.real = socket.create_server(("127.0.0.1", 0))
        self.errors: list[int] = []
        self.accepted = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise OSError(self.errors.pop(0), "injected")
        client = self.real.accept()
        self.accepted += 1
        return client

    def setblocking(self, flag: bool) -> None:
        self.real.setblocking(flag)

    def fileno(self) -> int:
        return self.real.fileno()

    def close(self) -> None:
        self.real.close()


class Worker:
    """The connections of one of several workers; ``others`` are those that it knows of."""

    def __init__(self) -> None:
        self.count = -1
        self.others: list[Worker] = []

    def report_connections(self, count: int) -> None:
        self.count = count

    def connections_of_others(self) -> list[tuple[int, int]]:
        return [(id(other), other.count) for other in self.others if other.count >= 0]


class Harness:
    """An acceptor over :class:`Listening`; ``made`` counts its connections."""

    def __init__(self) -> None:
        self.listening = Listening()
        self.made = 0
        self.clients: list[socket.socket] = []
        self.worker = Worker()
        self.acceptor = Acceptor(asyncio.get_running_loop(), self.listening, self._protocol, self.worker)  # type: ignore[arg-type]

    def _protocol(self) -> asyncio.Protocol:
        self.made += 1
        return asyncio.Protocol()

    def connect(self) -> socket.socket:
        client = socket.create_connection(self.listening.real.getsockname())
        self.clients.append(client)
        return client

    async def until(self, made: int) -> None:
        await until(lambda: self.made >= made, "they are accepted")


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.acceptor.close()
    for client in made.clients:
        client.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ECONNABORTED, errno.EPROTO, errno.EINTR])
async def test_a_connection_that_was_aborted_before_accept_is_skipped(harness: Harness, error: int) -> None:
    harness.listening.errors = [error]
    harness.connect()
    await harness.until(1)


async def test_a_crowd_is_accepted_some_in_each_turn(harness: Harness) -> None:
    """A turn may be long; so may be the backlog behind which a client waits."""
    for _ in range(5 * MOST_IN_A_TURN):
        harness.connect()
    accepted = [0]
    while accepted[-1] < 5 * MOST_IN_A_TURN:
        await asyncio.sleep(0)
        accepted.append(harness.listening.accepted)
    assert {after - before for before, after in itertools.pairwise(accepted)} <= {0, MOST_IN_A_TURN}


async def test_accepting_pauses_when_no_descriptor_is_left(harness: Harness) -> None:
    harness.listening.errors = [errno.ENFILE] * 4
    harness.connect()
    await harness.until(1)
    assert not harness.listening.errors


async def test_closing_during_a_pause_stops_accepting(harness: Harness) -> None:
    harness.listening.errors = [errno.ENOBUFS] * 2
    harness.connect()
    await until(lambda: not harness.listening.errors, "it has tried")
    await harness.acceptor.close()
    await harness.acceptor.close()
    await asyncio.sleep(0.1)
    assert harness.made == 0


async def test_a_worker_leaves_connections_to_one_that_has_fewer(harness: Harness) -> None:
    for _ in range(20):
        harness.connect()
    await harness.until(20)
    second = Worker()
    harness.worker.others, second.others = [second], [harness.worker]
    acceptor = Acceptor(asyncio.get_running_loop(), harness.listening.real.dup(), asyncio.Protocol, second)
    for _ in range(20):
        harness.connect()
    await until(lambda: harness.worker.count + second.count == 40, "all are accepted")
    assert abs(harness.worker.count - second.count) <= 2 * (MARGIN + 1)
    await acceptor.close()


async def test_a_worker_that_accepts_nothing_delays_connections_but_does_not_block_them(
    harness: Harness,
) -> None:
    stopped = Worker()
    stopped.count = 0
    harness.worker.others = [stopped]
    for _ in range(40):
        harness.connect()
    await harness.until(40)
    harness.acceptor.lost()
    assert harness.worker.count == 39
