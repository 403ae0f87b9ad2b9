"""A request's body as a replica gets it: the bytes that came, but for what is ours to say."""

from __future__ import annotations

from typing import NamedTuple

from gateway.body import Body
from gateway.splice import Buffer, force_usage, length, set_member, set_model, splice
from gateway.surface import Route

# Whose streams tell their usage only when they are asked to.
ASKED_FOR_USAGE = frozenset({"/v1/chat/completions", "/v1/completions"})


class Outgoing(NamedTuple):
    """``parts`` to be written one after the other, ``size`` bytes in all.

    ``counts`` says that the usage at the end of the stream was asked for by us and is not the client's.
    """

    parts: bytes | list[Buffer]
    size: int
    counts: bool


def outgoing(route: Route, body: Body, raw: bytes, salt: bytes, adapter: str = "") -> Outgoing:
    """``raw`` with the tenant's cache ``salt`` (a JSON string, or nothing), whatever the client said of it.

    ``model`` becomes the ``adapter``'s name at the replicas, if there is one. Without usage at its end a
    stream would count for nothing in fairness, predictions and budgets.
    """
    edits = []
    if adapter and adapter != body.model:
        edits.append(set_model(raw, adapter))
    if salt and route.runner is not None:  # what only counts tokens caches nothing
        edits.append(set_member(raw, "cache_salt", body.cache_salt, salt))
    counts = False
    if body.stream and route.path in ASKED_FOR_USAGE:
        usage = force_usage(raw, body.stream_options)
        if usage is not None:
            edits.append(usage)
            counts = True
    if not edits:
        return Outgoing(raw, len(raw), counts)
    parts = splice(raw, edits)
    return Outgoing(parts, length(parts), counts)
