"""Join several requests into one upstream call, and split its answer; inputs stay the bytes that came."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.protocol.body import MAX_DECODED, MAX_MEMBERS, RequestBody
from gateway.protocol.json_structure import MAX_DEPTH, JsonPieceReader, StructureScan
from gateway.protocol.paths import COMPLETIONS, ProxyRoute
from policy.admission.dynamic_batching import apportion
from policy.config.deployment import CoalesceConfig

_fields_of: Final = msgspec.json.Decoder(dict[str, Raw])
_items_of: Final = msgspec.json.Decoder(list[Raw])
_ITEMS: Final = {"/v1/embeddings": "data", "/v1/score": "data", COMPLETIONS: "choices"}
# The routes whose requests may travel together.
COALESCED: Final = frozenset(_ITEMS)
_PAIR = ("text_1", "text_2")
# A larger body is no short one, and would be taken apart in vain.
MAX_SHARED: Final = 64 * 1024


@dataclass(slots=True, eq=False)
class SubRequest:
    """One request's part of a call: ``inputs`` holds, for each field of :attr:`names`, its slices.

    ``group`` is equal for requests that may share a call: route, kind of input, tenant, adapter, and every
    other parameter byte by byte.
    """

    group: tuple[str, str, str, str, bytes]
    names: tuple[str, ...]
    inputs: tuple[Sequence[bytes], ...]

    @property
    def count(self) -> int:
        return len(self.inputs[0])

    @property
    def size(self) -> int:
        """Bytes of its inputs, by which prompt tokens are attributed to it."""
        return sum(len(piece) for pieces in self.inputs for piece in pieces)


def sub_request_of(
    route: ProxyRoute,
    body: RequestBody,
    raw: bytes,
    tenant: str,
    bounds: CoalesceConfig,
    *,
    adapter: str = "",
) -> SubRequest | None:
    """The inputs of ``raw`` that can share a call, or ``None`` if it cannot share one.

    Shared are embeddings, scores of pairs, and completions of a list of prompts, whole answers of one
    choice each, with fewer inputs than ``bounds.max_inputs`` of at most ``bounds.max_input_bytes``, in bodies
    of at most :data:`MAX_SHARED`.
    """
    if route.path not in _ITEMS or body.stream or body.n not in (None, 1) or not bounds.window_s:
        return None
    if len(raw) > MAX_SHARED:
        return None
    fields = body.members
    if route.path == "/v1/score":
        names: tuple[str, ...] = _PAIR
        inputs, kind = _pairs(fields)
    else:
        name = "prompt" if route.path == COMPLETIONS else "input"
        names = (name,)
        found, kind = _inputs(fields.get(name))
        if name == "prompt" and found and found[0] == bytes(fields[name]):
            return None  # a single completion gains nothing and would wait for the longest of the others
        inputs = (found,)
    if not kind or len(inputs[0]) >= bounds.max_inputs:
        return None
    if any(len(piece) > bounds.max_input_bytes for pieces in inputs for piece in pieces):
        return None
    others = sorted(item for item in fields.items() if item[0] not in names)
    rest = b",".join(b"%b:%b" % (msgspec.json.encode(name), value) for name, value in others)
    return SubRequest((route.path, kind, tenant, adapter, rest), names, inputs)


def join(together: Sequence[SubRequest]) -> bytes:
    """The body of the call that carries all of ``together``, which are of one group."""
    first = together[0]
    parts = [b"{", first.group[4]]
    for place, name in enumerate(first.names):
        pieces = b",".join(piece for share in together for piece in share.inputs[place])
        parts.append(b',"%b":[%b]' % (name.encode(), pieces))
    parts.append(b"}")
    return b"".join(parts)


async def split(
    answer: bytes, together: Sequence[SubRequest], id_: bytes, ids: Sequence[bytes], pieces: JsonPieceReader
) -> list[bytes]:
    """The answers of ``together``, in order, from the answer to the joined call.

    Items keep their order and count from 0 again. Where the answer's id holds the call's ``id_``, each
    gets its own of ``ids`` in its place. Engines report one usage for the whole call: prompt tokens are
    apportioned by the bytes of the inputs, output tokens by the bytes of the items, by largest
    remainder, so that the parts sum to the whole exactly; other members of a usage are left out.
    Raises ``ValueError`` for an answer that cannot be split. A large answer is read in ``pieces``.
    """
    key = _ITEMS[together[0].group[0]]
    count = sum(share.count for share in together)
    large = len(answer) > MAX_DECODED
    fields, raw_items = await _answer_of(answer, key, count, pieces)
    found: dict[int, dict[str, Raw]] = {}
    for raw_item in raw_items:
        item = _fields_of.decode(raw_item)
        found[msgspec.json.decode(item.get("index", b"-1"), type=int)] = item
        if large:
            await asyncio.sleep(0)
    if len(raw_items) != count or sorted(found) != list(range(count)):
        raise ValueError(f"the answer's items are not numbered 0 to {count - 1}")
    cut: list[list[Raw]] = []
    at = 0
    for share in together:
        own: list[Raw] = []
        for i in range(share.count):
            own.append(Raw(_renumbered(found[at + i], i)))
            if large:  # each of up to MAX_DECODED
                await asyncio.sleep(0)
        cut.append(own)
        at += share.count
    usages = _usages(fields["usage"], together, cut) if "usage" in fields else None
    whole_id = msgspec.json.decode(fields["id"], type=str) if "id" in fields else ""
    answers = []
    for place, own in enumerate(cut):
        own_answer: dict[str, Any] = {**fields, key: own}
        if whole_id:
            own_answer["id"] = whole_id.replace(id_.decode(), ids[place].decode())
        if usages is not None:
            own_answer["usage"] = usages[place]
        answers.append(msgspec.json.encode(own_answer))
        if large:
            await asyncio.sleep(0)
    return answers


async def _answer_of(
    answer: bytes, key: str, count: int, pieces: JsonPieceReader
) -> tuple[dict[str, Raw], list[Raw]]:
    """The members of an answer, and the items of that named ``key``, at most ``count``."""
    if len(answer) <= MAX_DECODED:
        fields = _fields_of.decode(answer)
        if key not in fields:
            raise ValueError(f"the answer has no {key}")
        return fields, _items_of.decode(fields[key])
    text = memoryview(answer)
    members = await pieces.members(StructureScan(answer, MAX_DEPTH, MAX_MEMBERS))
    spans = {str(member.name, "ascii"): member for member in members}
    if key not in spans or spans[key].items != count:
        raise ValueError(f"the answer has no {key} of {count} items")
    scan = StructureScan(answer, MAX_DEPTH, count, begin=spans[key].begin, end=spans[key].end)
    items = [text[item.begin : item.end] for item in await pieces.members(scan)]
    others = [text[span.begin : span.end] for name, span in spans.items() if name != key]
    if max(map(len, items + others)) > MAX_DECODED:
        raise ValueError(f"the answer has a part of more than {MAX_DECODED} bytes")
    fields = {name: Raw(text[span.begin : span.end]) for name, span in spans.items()}
    return fields, [Raw(item) for item in items]


def _inputs(value: Raw | None) -> tuple[Sequence[bytes], str]:
    """The single inputs in a field and what they are: ``text``, ``ids``, or nothing to be shared."""
    raw = b"" if value is None else bytes(value)
    if raw.startswith(b'"'):
        return (raw,), "text"
    if not raw.startswith(b"["):
        return (), ""
    pieces = [bytes(piece) for piece in _items_of.decode(raw)]
    if not pieces:
        return (), ""
    if all(piece.startswith(b'"') for piece in pieces):
        return pieces, "text"
    if all(piece.startswith(b"[") for piece in pieces):
        return pieces, "ids"
    return ((raw,), "ids") if all(piece.isdigit() for piece in pieces) else ((), "")


def _pairs(fields: dict[str, Raw]) -> tuple[tuple[Sequence[bytes], ...], str]:
    """Texts of both sides, the one on the left repeated where it stands against several."""
    left, kind = _inputs(fields.get("text_1"))
    right, other = _inputs(fields.get("text_2"))
    if kind != "text" or other != "text" or len(left) not in (1, len(right)):
        return (), ""
    return (list(left) * len(right) if len(left) == 1 else left, right), kind


def _renumbered(fields: dict[str, Raw], index: int) -> bytes:
    return msgspec.json.encode({**fields, "index": index})


def _usages(
    value: Raw, together: Sequence[SubRequest], cut: Sequence[Sequence[Raw]]
) -> list[dict[str, int]] | None:
    usage = msgspec.json.decode(value, type=dict[str, Any] | None)
    if usage is None:
        return None
    weights = {
        "prompt_tokens": [share.size for share in together],
        "completion_tokens": [sum(len(memoryview(item)) for item in own) for own in cut],
    }
    parts = {
        name: apportion(usage[name], weights[name]) for name in weights if isinstance(usage.get(name), int)
    }
    usages = [{name: part[place] for name, part in parts.items()} for place in range(len(together))]
    total = usage.get("total_tokens")
    if isinstance(total, int):
        counted = [sum(usage.values()) for usage in usages]
        for usage, part in zip(usages, apportion(total, counted), strict=True):
            usage["total_tokens"] = part
    return usages
