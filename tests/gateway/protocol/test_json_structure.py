"""The pieces of a value together find what one pass over the whole finds, wherever they are cut."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol.json_structure import (
    MAX_GAP_BYTES,
    PLAIN_DEPTH,
    BoundExceeded,
    JsonMember,
    StructureScan,
    depth_exceeds,
    lacks_members,
)

TEXTS = st.text(
    st.sampled_from(['"', "\\", "[", "}", ",", ":", "u", "d", "8", "x", "é", "😀", "\n"]), max_size=60
)
VALUES = st.recursive(
    TEXTS | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
# More than the two escapes of a surrogate pair, which stay together.
LEAST = 13
SPACES = st.sampled_from(["", " ", "\n\t "])


@st.composite
def written(draw: st.DrawFn, values: st.SearchStrategy[Any] = VALUES) -> bytes:
    space = draw(SPACES)
    text = json.dumps(
        draw(values), ensure_ascii=draw(st.booleans()), separators=(space + "," + space, space + ":" + space)
    )
    return (space + text + space).encode()


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def members(raw: bytes, piece_bytes: int, *, max_depth: int = 99, most: int = 99) -> list[JsonMember]:
    scan = StructureScan(raw, max_depth, most, piece_bytes=piece_bytes)
    while not scan.advance():
        pass
    return scan.members


CONTAINERS = st.lists(VALUES, max_size=4) | st.dictionaries(TEXTS, VALUES, max_size=4)


@given(written(CONTAINERS), st.integers(LEAST, 40))
def test_members_depth_and_items_are_those_of_the_value(raw: bytes, piece_bytes: int) -> None:
    value = json.loads(raw)
    found = members(raw, piece_bytes)
    values = list(value.values()) if isinstance(value, dict) else value
    assert [json.loads(raw[one.begin : one.end]) for one in found] == values
    assert [one.items for one in found] == [len(one) if isinstance(one, list) else 0 for one in values]
    names = [json.loads(b'"%b"' % one.name) for one in found]
    assert names == (list(value) if isinstance(value, dict) else [""] * len(value))
    deep = depth(value)
    assert depth_exceeds(raw, deep - 1)
    assert not depth_exceeds(raw, deep)
    members(raw, piece_bytes, max_depth=deep, most=len(values))
    with pytest.raises(BoundExceeded):
        members(raw, piece_bytes, max_depth=deep - 1)
    if values:
        with pytest.raises(BoundExceeded):
            members(raw, piece_bytes, most=len(values) - 1)


@given(
    written(CONTAINERS),
    st.integers(LEAST, 40),
    st.integers(0, 200),
    st.sampled_from(
        [b"", b",", b":", b'"', b"\\", b"[", b"}", b"]", b"{", b"0", b"\\u", b"\x01", b"x", b" "]
    ),
    st.integers(0, 3),
)
@example(rb'["\ud83d\ude00"]', LEAST, 8, b"", 0)
def test_pieces_are_valid_where_the_whole_is(
    raw: bytes, piece_bytes: int, at: int, other: bytes, length: int
) -> None:
    """The value is changed somewhere, mostly to no JSON."""
    raw = raw[:at] + other + raw[at + length :]
    try:
        value = msgspec.json.decode(raw, type=msgspec.Raw)
        valid = bytes(value)[:1] in (b"[", b"{")
    except ValueError:
        valid = False
    try:
        members(raw, piece_bytes)
        found = True
    except ValueError:
        found = False
    if valid or bytes(raw).strip()[:1] in (b"[", b"{"):
        assert found is valid


def test_every_place_of_a_cut() -> None:
    raw = json.dumps({"a\\": ['\\\\"', "😀é\\u", {"b": [[], {}], "": "\n"}], "c": -1.5e3}).encode()
    for piece_bytes in range(LEAST, len(raw)):
        assert members(raw, piece_bytes) == members(raw, len(raw))


def test_a_value_without_a_place_to_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="no comma and no string"):
        members(b"[" + b" " * (2 * MAX_GAP_BYTES) + b"]", MAX_GAP_BYTES)


NAMES = frozenset({b"file", b"image_url"})
KEYS = st.sampled_from(["file", "image_url", "fil\\u0065", "content", "é", '"'])
NAMED = st.recursive(
    TEXTS | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def names_in(value: Any) -> set[str]:
    if isinstance(value, list):
        return set[str]().union(*map(names_in, value))
    return set(value).union(*map(names_in, value.values())) if isinstance(value, dict) else set()


@given(st.dictionaries(TEXTS, NAMED, max_size=3), st.booleans())
@example({"x": [{"file": 1}]}, True)
@example({"file": "a\\", "x": [{"content": '\\"file":'}]}, True)
def test_a_value_that_lacks_members_has_none_of_them(value: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    inner = set[str]().union(*map(names_in, value.values()))
    plain = inner.isdisjoint({"file", "image_url"}) and depth(value) <= PLAIN_DEPTH
    if lacks_members(raw, NAMES):
        assert plain
    else:
        assert not plain or any(not name.isascii() or json.dumps(name) != f'"{name}"' for name in inner)


def test_members_are_not_looked_for_in_long_structures() -> None:
    assert lacks_members(json.dumps({"x": [{"content": "x" * 200_000 + '"'}]}).encode(), NAMES)
    assert not lacks_members(json.dumps({"x": [[7] * 9_000]}).encode(), NAMES)
    assert not lacks_members(json.dumps({"x": [{"content": '"' * 9_000}]}).encode(), NAMES)
