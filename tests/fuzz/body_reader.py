"""Bodies: both ways to read one agree, and a replica gets what the client sent, less what is dropped.

The first byte of an input chooses a route.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any
from unittest import mock

from gateway.protocol import body as bodies
from gateway.protocol.body import AcceptedBody, BodyRules, accept, accept_large
from gateway.protocol.errors import Refused
from gateway.protocol.json_splice import upstream_body
from gateway.protocol.json_structure import JsonPieceReader, StructureScan
from gateway.protocol.paths import ROUTES
from gateway.protocol.restricted_features import used_features
from gateway.protocol.validation import media
from gateway.protocol.validation.forwarded_fields import KNOWN, STEERING

PATHS = sorted(ROUTES)
RULES = BodyRules(frozenset({"a.b"}), frozenset({"extra"}))
# Large bodies may have fewer members, and names that are not kept.
ONLY_LARGE = ("members", "before byte")
_FIELDS = sorted(frozenset[str]().union(*KNOWN.values(), STEERING))

_PART = (
    '{"type":"image_url","image_url":{"url":"https://a.b/c"}},{"image_url":"data:,"},{"source":{"data":"A"}}'
)
_FORMAT = '{"type":"json_schema","json_schema":{"schema":{"enum":[1],"pattern":"(a{2}|[^b]){3,4}"}}}'
_TEXTS = (
    '{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":5,"x":[{}]}',
    '{"model":"m","messages":[{"role":"user","content":[' + _PART + ']},"a",[{"output":[{}]}]]}',
    '{"model":"m","n":2,"stop":["a","b"],"logit_bias":{"1":-1},"logprobs":true,"top_logprobs":3,"priority":null}',
    '{"model":"m","response_format":' + _FORMAT + ',"structured_outputs":{"json":"{}"},"tools":[{"a":{}}]}',
    '{"mod\\u0065l":"m","prompt":[[1,2],[3]],"stream_options":{"include_usage":false},"cache_salt":"\\ud83d\\ude00"}',
    '{"model":"m","input":["a","b"],"text_1":"a","text_2":["b"],"documents":[{"content":[]}],"tokens":[1,2.5e3]}',
    '{"model":"é","model":"m","chat_template_kwargs":{"a":1},"extra":1,"metadata":{"user_id":"{}"},"x":0 }',
)
SEEDS = [bytes([route]) + text.encode() for route in range(len(PATHS)) for text in _TEXTS]
WORDS = [
    *(b'"%b":' % name.encode() for name in _FIELDS),
    b"null",
    b"\\u0061",
    b"\\ud83d",
    b"https://",
    b"data:,",
]


async def _read_large(raw: bytes, path: str) -> AcceptedBody:
    with (
        mock.patch.object(bodies, "StructureScan", partial(StructureScan, piece_bytes=16)),
        mock.patch.object(media, "StructureScan", partial(StructureScan, piece_bytes=16)),
        mock.patch.object(media, "_AT_ONCE", 24),
    ):
        return await accept_large(raw, ROUTES[path], RULES, JsonPieceReader())


def check(data: bytes) -> None:
    """Fails if reading ``data`` does, or if its two ways differ."""
    path, raw = PATHS[(data[0] if data else 0) % len(PATHS)], data[1:]
    found: list[AcceptedBody | Refused] = []
    for read in (lambda: accept(raw, ROUTES[path], RULES), lambda: asyncio.run(_read_large(raw, path))):
        try:
            found.append(read())
        except Refused as refused:
            assert refused.status == 400
            assert len(refused.body()) <= 4096
            found.append(refused)
    small, large = found
    if isinstance(small, Refused):
        return
    if isinstance(large, Refused):
        assert any(text in large.message for text in ONLY_LARGE), large.message
        return
    assert set(small.dropped) == set(large.dropped)
    wanted = {name: value for name, value in _decoded(raw).items() if name not in small.dropped}
    for accepted in (small, large):
        used_features(accepted.body, ROUTES[path])
        sent = upstream_body(ROUTES[path], accepted.body, accepted.raw, b'"salt"', "other")
        made = _decoded(b"".join(sent.parts) if isinstance(sent.parts, list) else sent.parts)
        edited = {"model", "cache_salt", "stream_options"}
        assert {k: v for k, v in made.items() if k not in edited} == {
            k: v for k, v in wanted.items() if k not in edited
        }
        assert made["model"] == "other" or accepted.body.model == "other"
    assert (small.body.media, small.body.choices) == (large.body.media, large.body.choices)


def _decoded(raw: bytes) -> dict[str, Any]:
    """As an engine reads it: of equal names the last counts. Texts that are no UTF-8 are left to engines."""
    found: dict[str, Any] = json.loads(raw.decode(errors="replace"))
    return found
