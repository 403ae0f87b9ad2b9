"""The sink of an answer gets the same bytes however its chunks are split into reads."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.http1_client import ConnectionPool, Http1ClientConnection, encode_chunk

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
# Payloads that look like framing.
PIECES = st.lists(
    st.sampled_from([b"a", b"\r\n", b"0\r\n", b"1\r\na\r\n", b"ff", b"\r", b"\n", b"x" * 300]), min_size=1
)


class Wire:
    """A transport on which nothing is written."""

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class Taken:
    """A sink that keeps what it is given; ``framed`` counts the reads that were one chunk."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False
        self.framed = 0

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        assert status == 200

    def on_data(self, data: bytes, *, complete: bool) -> None:
        self.body += data
        self.complete = complete

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        assert framed == chunk(data)
        self.body += data
        self.framed += 1

    def on_lost(self, *, stale: bool) -> None:
        raise AssertionError("the connection was fine")


def chunk(data: bytes, size: str = "%x") -> bytes:
    return size.encode() % len(data) + b"\r\n" + data + b"\r\n"


def taken(reads: list[bytes]) -> Taken:
    """What a sink receives of an answer in these reads."""
    connection = Http1ClientConnection(ConnectionPool("http://replica:1", 1.0))
    connection.connection_made(cast("object", Wire()))  # type: ignore[arg-type]
    sink = Taken()
    connection.send(sink, b"", b"")
    for read in reads:
        connection.data_received(read)
    return sink


def test_a_read_that_is_one_chunk_is_passed_on_as_it_came() -> None:
    sink = taken([HEAD, chunk(b"a"), chunk(b"bc"), chunk(b"d" * 300), END])
    assert (sink.body, sink.complete, sink.framed) == (b"abc" + b"d" * 300, True, 2)


@given(
    st.lists(PIECES, max_size=6),
    st.lists(st.integers(min_value=0), max_size=12),
    st.sampled_from(["%x", "%X", "%04x", "%x;e=1"]),
)
def test_chunks_may_be_cut_anywhere(chunks: list[list[bytes]], cuts: list[int], size: str) -> None:
    bodies = [b"".join(pieces) for pieces in chunks]
    data = HEAD + b"".join(chunk(body, size) for body in bodies) + END
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    sink = taken([data[a:b] for a, b in itertools.pairwise(edges)])
    assert sink.body == b"".join(bodies)
    assert sink.complete


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"0\r\n\r\n",
        b"1\r\n",
        b"1\r\na",
        b"1\r\nab\r\n",
        b"+1\r\na\r\n",
        b"1 \r\na\r\n",
        b"1_0\r\n" + b"a" * 16 + b"\r\n",
        b"g\r\na\r\n",
        b"1;x\r\na\r\n",
        b"\r\n\r\n",
        b"1\r\na\n\n",
        b"00000001\r\na\r\n",
        b"2\r\na\r\n",
    ],
)
def test_anything_but_one_whole_chunk_is_left_to_the_parser(data: bytes) -> None:
    assert encode_chunk(data) is None
