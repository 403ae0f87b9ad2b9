"""Edits at offsets: only the named member of the outermost object changes, whatever surrounds it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.protocol.body import read
from gateway.protocol.json_decoders import ABSENT
from gateway.protocol.json_splice import (
    JsonEdit,
    UpstreamRequestBody,
    force_usage,
    locate,
    set_member,
    set_model,
    splice,
    upstream_body,
)
from gateway.protocol.paths import ROUTES

TEXTS = st.sampled_from(["x", '"model":"y"', 'stream_options":{}', "{[", "é", "\\", '\\"cache_salt\\":1'])
NAMES = st.sampled_from(["model", "stream_options", "cache_salt", "system", "a", '{"', "é"])
VALUES = st.recursive(
    TEXTS | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, dict[str, Any]]:
    """A body with its names in any order and any whitespace, and its content."""
    content = draw(st.dictionaries(NAMES, VALUES, max_size=5))
    content["model"] = draw(TEXTS)
    if draw(st.booleans()):
        content["stream_options"] = draw(
            st.none() | st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": VALUES})
        )
    else:
        content.pop("stream_options", None)
    content.pop("chat_template_kwargs", None)
    names = draw(st.permutations(list(content)))
    content = {name: content[name] for name in names}
    space = draw(st.sampled_from(["", " ", "\n\t "]))
    text = json.dumps(
        content, indent=draw(st.sampled_from([None, 1])), ensure_ascii=draw(st.booleans()),
        separators=(space + "," + space, space + ":" + space),
    )  # fmt: skip
    return (space + text + space).encode(), content


@pytest.mark.slow
@given(bodies())
def test_only_edited_members_change_in_a_body(given_body: tuple[bytes, dict[str, Any]]) -> None:
    raw, content = given_body
    body = read(raw)
    edits = [set_model(raw, body, 'o"ther'), set_member(raw, "cache_salt", body.cache_salt, b'"salt"')]
    forced = force_usage(raw, body.stream_options)
    if forced is not None:
        edits.append(forced)
    edited = b"".join(splice(raw, edits))
    expected = {**content, "model": 'o"ther', "cache_salt": "salt"}
    options = content.get("stream_options") or {}
    assert (forced is None) == bool(options.get("include_usage"))
    if forced is not None:
        expected["stream_options"] = {**options, "include_usage": True}
    assert json.loads(edited) == expected
    assert json.loads(edited, object_pairs_hook=len) == len(expected)


@given(bodies())
def test_an_edit_changes_no_other_byte(given_body: tuple[bytes, dict[str, Any]]) -> None:
    raw, content = given_body
    begin, end = locate(raw, read(raw).stream_options) if "stream_options" in content else (0, 0)
    edited = b"".join(splice(raw, [JsonEdit(begin, end, b"!")]))
    assert edited == raw[:begin] + b"!" + raw[end:]


def test_an_escaped_name_is_the_same_name() -> None:
    raw = b'{"m\\u006fdel":"x","stream_\\u006fptions":{}}'
    body = read(raw)
    edits = [set_model(raw, body, "y"), force_usage(raw, body.stream_options)]
    edited = b"".join(splice(raw, [edit for edit in edits if edit is not None]))
    assert json.loads(edited) == {"model": "y", "stream_options": {"include_usage": True}}


def test_usage_per_chunk_is_not_requested() -> None:
    raw = b'{"model":"x","stream_options":{"continuous_usage_stats":true}}'
    edit = force_usage(raw, read(raw).stream_options)
    assert edit is not None
    assert edit.text == b'{"include_usage":true}'


def test_invalid_stream_options_are_left_to_the_engine() -> None:
    assert force_usage(b'{"stream_options":7}', Raw(b"7")) is None


def test_a_large_body_is_not_copied() -> None:
    raw = b'{"model":"x","system":"' + b"a" * 1000 + b'"}'
    parts = splice(raw, [set_member(raw, "cache_salt", ABSENT, b'"s"')])
    assert [part.obj is raw for part in parts if isinstance(part, memoryview)] == [True, True]


def test_a_value_of_another_body_is_not_located() -> None:
    with pytest.raises(ValueError, match="not a part"):
        locate(b"{}", Raw(b"[1,2,3]"))


def test_edits_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        splice(b"{}" * 9, [JsonEdit(0, 4, b""), JsonEdit(3, 5, b"")])


SALT = b'"5a17"'


def out(raw: bytes, salt: bytes = SALT, path: str = "/v1/chat/completions") -> UpstreamRequestBody:
    return upstream_body(ROUTES[path], read(raw), raw, salt)


def joined(sent: UpstreamRequestBody) -> bytes:
    whole = sent.parts if isinstance(sent.parts, bytes) else b"".join(sent.parts)
    assert len(whole) == sent.size
    return whole


def test_a_body_without_edits_is_not_copied() -> None:
    raw = b'{"model":"m","messages":[],"cache_salt":"own"}'
    sent = out(raw, salt=b"")
    assert sent.parts is raw
    assert not sent.counts


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"model":"m"}', b'{"cache_salt":"5a17","model":"m"}'),
        (b'{"model":"m","cache_salt":"other\'s"}', b'{"model":"m","cache_salt":"5a17"}'),
        (b'{"model":"m", "cache_salt" : null }', b'{"model":"m", "cache_salt" : "5a17" }'),
        (
            b'{"model":"m","metadata":{"cache_salt":"x"}}',
            b'{"cache_salt":"5a17","model":"m","metadata":{"cache_salt":"x"}}',
        ),
    ],
)
def test_the_tenants_salt_replaces_the_clients(raw: bytes, expected: bytes) -> None:
    assert joined(out(raw)) == expected


@pytest.mark.parametrize("path", ROUTES)
def test_generating_and_pooling_routes_are_salted(path: str) -> None:
    salt = json.loads(joined(out(b'{"model":"m"}', path=path))).get("cache_salt")
    assert salt == (None if ROUTES[path].runner is None else "5a17")


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (..., True),
        (None, True),
        ({}, True),
        ({"include_usage": False}, True),
        ({"include_usage": True}, False),
    ],
)
def test_usage_is_requested_of_every_stream(options: Any, counts: bool) -> None:
    body: dict[str, Any] = {"model": "m", "stream": True}
    if options is not ...:
        body["stream_options"] = options
    sent = out(json.dumps(body).encode())
    asked = json.loads(joined(sent))
    assert asked == {**body, "cache_salt": "5a17", "stream_options": {"include_usage": True}}
    assert sent.counts is counts


FORMS = [
    "true", "1", "1.0", "10e-1", '"1"', '"true"', '"TRUE"', '"on"', '"On"', '"t"', '"Y"', '"yes"',
    '"\\u006fn"', "false", "null", "0", "0.0", "-0.0", '"0"', '"off"', '"no"', '"f"', '"N"', '"false"',
    "2", "1.5", "-1", '" true"', '"1.0"', '"x"', '""', "[1]", "{}", "1e999", "9" * 400,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_client_gets_its_usage_in_every_form_that_engines_read_as_true(form: str) -> None:
    adapter = pytest.importorskip("pydantic").TypeAdapter(bool | None)
    try:
        asks = bool(adapter.validate_python(json.loads(form)))
    except ValueError:  # engines refuse it
        asks = False
    options = f'{{"include_usage":{form},"continuous_usage_stats":true}}'
    sent = out(f'{{"model":"m","stream":true,"stream_options":{options}}}'.encode())
    assert sent.counts is not asks
    expected = {"include_usage": True} | ({"continuous_usage_stats": True} if asks else {})
    assert json.loads(joined(sent))["stream_options"] == expected


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_routes_that_report_usage_unasked_are_not_edited(path: str) -> None:
    raw = b'{"model":"m","stream":true}'
    sent = out(raw, salt=b"", path=path)
    assert sent.parts is raw
    assert not sent.counts
