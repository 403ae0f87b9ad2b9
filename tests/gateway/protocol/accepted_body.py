"""A body as a route accepts it, whichever way it is read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gateway.protocol.body import MAX_DECODED, AcceptedBody, BodyRules, accept, accept_large
from gateway.protocol.json_structure import JsonPieceReader
from gateway.protocol.paths import ROUTES

# A field that may be long: those that the gateway knows are short, but for what models read.
PADDED = BodyRules(extra_fields=frozenset({"filler"}))


def accepted_body(
    content: dict[str, Any] | bytes, path: str = "/v1/chat/completions", rules: BodyRules | None = None
) -> AcceptedBody:
    """Read at once if that is short enough, else in pieces."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    rules = rules or PADDED
    if len(raw) <= MAX_DECODED:
        return accept(raw, ROUTES[path], rules)
    return asyncio.run(accept_large(raw, ROUTES[path], rules, JsonPieceReader()))
