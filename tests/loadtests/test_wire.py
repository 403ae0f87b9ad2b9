"""The connection of users, against a server that a test scripts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from loadtests.http_client import BlockingHttpConnection

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

Script = Callable[[socket.socket], None]


@contextmanager
def server(*scripts: Script) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def play() -> None:
            for script in scripts:
                connection, _ = listener.accept()
                with connection:
                    script(connection)

        thread = threading.Thread(target=play)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(timeout=60)
        assert not thread.is_alive()


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    return data


def answers_once(connection: socket.socket) -> None:
    read_request(connection)
    connection.sendall(WHOLE)


def ignore_body(data: bytes, at: float) -> bool:
    return True


def test_a_closed_idle_connection_is_replaced() -> None:
    with server(answers_once, answers_once) as url, BlockingHttpConnection(url) as connection:
        assert connection.get("/a") == (200, b"hi")
        assert connection.get("/b") == (200, b"hi")


@pytest.mark.parametrize("partial", [CHUNKED + b"2\r\nhi\r\n", b""], ids=["partial", "none"])
def test_a_request_is_not_repeated_without_a_whole_answer(partial: bytes) -> None:
    def breaks(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(partial)

    with (
        server(breaks) as url,
        BlockingHttpConnection(url) as connection,
        pytest.raises(ConnectionResetError),
    ):
        connection.post("/a", b"", ignore_body)


def test_a_sink_that_returns_false_closes_the_connection() -> None:
    seen: list[bytes] = []

    def streams(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(CHUNKED + b"2\r\nhi\r\n")
        seen.append(connection.recv(1))

    with server(streams) as url, BlockingHttpConnection(url) as connection:
        answer = connection.post("/a", b"", lambda data, at: False)
        assert (answer.status, answer.complete) == (200, False)
    assert seen == [b""]
