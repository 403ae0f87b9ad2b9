"""A response written at once is, byte for byte, the one that is sent as ASGI messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import cast

import pytest

from gateway.http.asgi_exchange import SENT, AsgiExchange
from gateway.http.server_connection import ServerConnection


@dataclass
class Connection:
    draining: bool
    written: bytes = b""
    ended: list[bool] = field(default_factory=list)
    sent = SENT

    def general_header(self) -> bytes:
        return b"date: today\r\n"

    def write(self, data: bytes) -> None:
        self.written += data

    def answered(self, exchange: AsgiExchange) -> None:
        self.ended.append(exchange.keep)


@pytest.mark.parametrize(("keep", "http_1_1", "headless", "draining"), list(product((True, False), repeat=4)))
def test_an_answer_in_one_write_is_that_in_two_messages(
    keep: bool, http_1_1: bool, headless: bool, draining: bool
) -> None:
    def exchange() -> tuple[Connection, AsgiExchange]:
        made = Connection(draining)
        connection = cast("ServerConnection", made)
        return made, AsgiExchange(connection, b"", keep=keep, http_1_1=http_1_1, headless=headless)

    body, headers = b'{"x":1}', [(b"content-type", b"application/json"), (b"x-request-id", b"7")]
    by_messages, other = exchange()
    length = [(b"content-length", b"%d" % len(body))]
    other.send({"type": "http.response.start", "status": 200, "headers": [*headers, *length]})
    other.send({"type": "http.response.body", "body": body})
    at_once, one = exchange()
    one.answer(b"".join(b"%b: %b\r\n" % header for header in headers), body)
    assert at_once == by_messages
    assert one.done
    written = at_once.written
    one.answer(b"", body)
    assert at_once.written == written, "a response that is complete is not sent again"
