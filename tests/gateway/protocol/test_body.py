"""A body that is read in pieces is taken for the same as one that is decoded at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.delivery.crash_suspects import fingerprint
from gateway.protocol.body import MAX_MEMBERS, RequestBody, read, read_large
from gateway.protocol.errors import Refused
from gateway.protocol.json_decoders import RAW_FIELDS, SCALARS
from gateway.protocol.json_splice import upstream_body
from gateway.protocol.json_structure import MAX_GAP_BYTES, JsonPieceReader
from gateway.protocol.paths import ROUTES
from gateway.protocol.validation.engine_work_limits import MAX_FIELD
from tests.gateway.protocol.test_json_splice import bodies


def large(raw: bytes) -> RequestBody:
    return asyncio.run(read_large(raw, JsonPieceReader()))


def same(raw: bytes) -> None:
    one, other = read(raw), large(raw)
    assert [getattr(one, name) for name in SCALARS] == [getattr(other, name) for name in SCALARS]
    assert [bytes(getattr(one, name)) for name in RAW_FIELDS] == [
        bytes(getattr(other, name)) for name in RAW_FIELDS
    ]
    assert one.choices == other.choices
    sent = [upstream_body(ROUTES["/v1/completions"], body, raw, b'"salt"', "other") for body in (one, other)]
    assert b"".join(sent[0].parts) == b"".join(sent[1].parts)
    assert (sent[0].size, sent[0].counts) == (sent[1].size, sent[1].counts)
    assert fingerprint("t", "/p", one) == fingerprint("t", "/p", other)


@pytest.mark.slow
@given(bodies())
def test_fields_and_edits_are_the_same(given_body: tuple[bytes, dict[str, Any]]) -> None:
    same(given_body[0])


FIELDS: tuple[bytes, ...] = (
    b'"stream":true', b'"stream":true,"stream_options":{"include_usage":false}', b'"n":2,"prompt":["a","b"]',
    b'"prompt":[ [1,2],[3] ]', b'"prompt":[1,2]', b'"prompt":[]', b'"prompt":"[a,b]"', b'"prompt":null',
    b'"n":1,"n":2', b'"mod\\u0065l":"y"', b'"stop":["a"]', b'"priority":null', b'"max_tokens":null',
)  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_fields_are_read_in_any_notation(field: bytes) -> None:
    same(b'{"model":"m",%b}' % field)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"n":1}', b'{"model":1}', b'{"model":"m","n":"2"}', b'{"model":"m","n":9}',
        b'{"model":"m","n":1.5}',
        b'{"model":"m","stop":["","","","",""]}', b'{"model":"m","prior\\u0069ty":1}',
        b'{"model":"m","chat_template_kwargs":{"chat_template":"x"}}', b'{"model":"m","background":true}',
        b'{"model":"m","messages":null}', b'{"model":"m","tools": 5}',
        b'{"model":"m","structured_outputs":[]}',
        b'{"model":"m","x":%b1%b}' % (b"[" * 64, b"]" * 64),
    ],
)  # fmt: skip
def test_refusals_are_the_same(raw: bytes) -> None:
    with pytest.raises(Refused) as one:
        read(raw)
    with pytest.raises(Refused) as other:
        large(raw)
    assert (one.value.message, one.value.param) == (other.value.message, other.value.param)


@pytest.mark.parametrize(
    ("raw", "message", "param"),
    [
        (b"[" * 9, "not a JSON object", None),
        (b" " * MAX_GAP_BYTES + b'{"model":"m"}', "not a JSON object", None),
        (b'{"model":"m",}', "not valid JSON", None),
        (
            json.dumps({"model": "m", **{str(i): 0 for i in range(MAX_MEMBERS)}}).encode(),
            "1024 members",
            None,
        ),
        (json.dumps({"model": "m" * MAX_FIELD}).encode(), "model takes at most 65536 bytes", "model"),
        (json.dumps({"model": "m", "stop": "s" * MAX_FIELD}).encode(), "stop takes at most", "stop"),
    ],
)
def test_a_large_body_has_bounds(raw: bytes, message: str, param: str | None) -> None:
    with pytest.raises(Refused, match=message) as refused:
        large(raw)
    assert refused.value.param == param


@given(st.integers(0, MAX_FIELD))
def test_prompts_have_no_bound_of_their_own(size: int) -> None:
    same(b'{"model":"m","messages":[{"content":"%b"}]}' % (b"a" * (MAX_FIELD + size)))
