"""Checks of a request against its tenant's and key's permissions: features, and the longest answer."""

from __future__ import annotations

from msgspec import Raw

from gateway.protocol.errors import Refused
from gateway.protocol.json_decoders import RequestBody
from gateway.protocol.paths import COMPLETIONS, ApiDialect, ProxyRoute
from gateway.protocol.prompt_features import DEFAULT_COMPLETION_TOKENS
from gateway.protocol.restricted_features import used_features
from policy.errors import Refusal
from policy.types import Runner


def check_features(route: ProxyRoute, body: RequestBody, allowed: frozenset[str]) -> None:
    """Refuse a request that uses a feature that is not among the ``allowed`` ones."""
    if denied := used_features(body, route) - allowed:
        names = ", ".join(sorted(denied))
        message = f"This API key does not allow {names}."
        raise Refused(Refusal.UNSUPPORTED, message, status=403, code="feature_not_allowed")


def bound_answer(route: ProxyRoute, body: RequestBody, most: int) -> None:
    """Bound each answer to ``most`` tokens if neither the client nor its API did.

    Raises :class:`gateway.protocol.errors.Refused` for a request for more.
    """
    if route.runner is not Runner.GENERATE:
        return
    if route.api is ApiDialect.RESPONSES:
        given = {"max_output_tokens": body.max_output_tokens}
    elif route.path == "/v1/chat/completions":
        given = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
    else:
        given = {"max_tokens": body.max_tokens}
    for name, tokens in given.items():
        if tokens is not None and tokens > most:
            message = f"{name} is {tokens}: this API key allows answers of at most {most} tokens."
            raise Refused(Refusal.BAD_REQUEST, message, param=name, code="max_tokens_exceeded")
    if any(tokens is not None for tokens in given.values()):
        return
    name = next(iter(given))
    if route.path == COMPLETIONS:
        most = min(most, DEFAULT_COMPLETION_TOKENS)
    setattr(body, name, most)
    body.members[name] = Raw(b"%d" % most)
    body.added = b',"%b":%d' % (name.encode(), most)
