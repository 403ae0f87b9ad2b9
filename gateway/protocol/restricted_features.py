"""Features that a request uses beyond text, for the permissions of tenants and keys."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from gateway.protocol.json_decoders import RequestBody
from gateway.protocol.paths import ProxyRoute
from gateway.protocol.validation.engine_work_limits import counts_logprobs
from policy.config.tenancy import Feature
from policy.types import Runner

_TOOLS = ("tools", "functions", "mcp_servers")
_LOGPROBS = ("logprobs", "top_logprobs", "logprob_token_ids")
# Of these any value but a null asks for a structured answer.
_STRUCTURED = (
    "structured_outputs", "output_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
# These hold more than a format; of a format the type `text` is none.
_FORMATS = ("response_format", "text", "output_config")
_INCLUDED: Final = "message.output_text.logprobs"
_ASKING: Final = frozenset({*_TOOLS, *_LOGPROBS, *_STRUCTURED, *_FORMATS, "include"})
_NOTHING = (b"null", b"false", b"[]")
_NONE: Final = frozenset[Feature]()


def used_features(body: RequestBody, route: ProxyRoute) -> frozenset[Feature]:
    """The features that a request uses, once its body was accepted; media of all kinds are images."""
    fields = body.members
    pools = route.runner is Runner.POOLING
    if not (pools or body.media or body.defines_tools) and _ASKING.isdisjoint(fields):
        return _NONE
    used: set[Feature] = set()
    if pools:
        used.add(Feature.EMBEDDINGS)
    if body.media:
        used.add(Feature.IMAGES)
    if body.defines_tools or any(_asks(fields, name) for name in _TOOLS):
        used.add(Feature.TOOLS)
    wants_logprobs = any(_asks(fields, name) for name in _LOGPROBS) or counts_logprobs(fields, route.path)
    if wants_logprobs or _includes_logprobs(fields):
        used.add(Feature.LOGPROBS)
    if any(_asks(fields, name) for name in _STRUCTURED) or any(
        _has_format(fields, name) for name in _FORMATS
    ):
        used.add(Feature.STRUCTURED_OUTPUTS)
    return frozenset(used)


def _asks(fields: dict[str, Raw], name: str) -> bool:
    value = fields.get(name)
    return value is not None and bytes(memoryview(value)[:8]) not in _NOTHING


def _includes_logprobs(fields: dict[str, Raw]) -> bool:
    try:
        included = msgspec.json.decode(fields["include"]) if "include" in fields else None
    except ValueError:  # no UTF-8, which the engine refuses
        return False
    return isinstance(included, list) and _INCLUDED in included


def _has_format(fields: dict[str, Raw], name: str) -> bool:
    """Whether the field, which is short, holds a format of answers that is not plain text."""
    found = msgspec.json.decode(fields[name]) if name in fields else None
    if isinstance(found, dict) and name != "response_format":
        found = found.get("format")
    return found is not None and not (isinstance(found, dict) and found.get("type") == "text")
