"""Connections are taken one at a time, and what goes wrong with one never closes the port."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.http.acceptor import Acceptor
from tests.gateway.worker import until


class Listening:
    """A listening socket whose accept() fails as it is told to."""

    def __init__(self) -> None:
        self.real = socket.create_server(("127.0.0.1", 0))
        self.errors: list[int] = []

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise OSError(self.errors.pop(0), "as told")
        return self.real.accept()

    def setblocking(self, flag: bool) -> None:
        self.real.setblocking(flag)

    def fileno(self) -> int:
        return self.real.fileno()

    def close(self) -> None:
        self.real.close()


class Door:
    """An acceptor over :class:`Listening`; ``made`` counts its connections."""

    def __init__(self) -> None:
        self.listening = Listening()
        self.made = 0
        self.clients: list[socket.socket] = []
        self.acceptor = Acceptor(asyncio.get_running_loop(), self.listening, self._protocol)  # type: ignore[arg-type]

    def _protocol(self) -> asyncio.Protocol:
        self.made += 1
        return asyncio.Protocol()

    def knock(self) -> socket.socket:
        client = socket.create_connection(self.listening.real.getsockname())
        self.clients.append(client)
        return client

    async def until(self, made: int) -> None:
        await until(lambda: self.made >= made, "they are let in")


@pytest_asyncio.fixture
async def door() -> AsyncIterator[Door]:
    made = Door()
    yield made
    await made.acceptor.close()
    for client in made.clients:
        client.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ECONNABORTED, errno.EPROTO, errno.EINTR])
async def test_a_connection_that_is_gone_is_no_matter(door: Door, error: int) -> None:
    door.listening.errors = [error]
    door.knock()
    await door.until(1)


async def test_when_not_even_that_works_it_rests_and_tries_again(door: Door) -> None:
    door.listening.errors = [errno.ENFILE] * 4
    door.knock()
    await door.until(1)
    assert not door.listening.errors


async def test_closing_while_it_rests_ends_it(door: Door) -> None:
    door.listening.errors = [errno.ENOBUFS] * 2
    door.knock()
    await until(lambda: not door.listening.errors, "it has tried")
    await door.acceptor.close()
    await door.acceptor.close()
    await asyncio.sleep(0.1)
    assert door.made == 0
