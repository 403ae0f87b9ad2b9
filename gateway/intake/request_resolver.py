"""Resolve an arriving request: its model, its adapter, and the features that decisions use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from gateway.intake.adapter_catalog import CatalogView
from gateway.intake.principal import Principal
from gateway.protocol.body import RequestBody
from gateway.protocol.canonical_prompt import canonical_prompt
from gateway.protocol.client_session import given_session, session_key
from gateway.protocol.errors import Refused, unknown
from gateway.protocol.paths import COMPLETIONS, ProxyRoute
from gateway.protocol.prompt_features import (
    DEFAULT_COMPLETION_TOKENS,
    NOTHING,
    adapter_key,
    limit_of,
    seed_of,
)
from gateway.protocol.validation.engine_work_limits import wants_prompt_logprobs
from gateway.request_context import RequestContext
from gateway.routing.fleet import FleetView, ServedModel
from gateway.routing.model_routers import ModelRouters
from policy.errors import Refusal
from policy.request import Request
from policy.types import EngineKind, Runner

# Compared for each request: machine code reads a constant faster than a member of an enumeration.
_POOLING: Final = Runner.POOLING
_EXTERNAL: Final = EngineKind.EXTERNAL


@dataclass(eq=False)
class RequestResolver:
    fleet: FleetView
    catalog: CatalogView
    routers: ModelRouters

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time

    def take(
        self, call: RequestContext, principal: Principal, body: RequestBody, raw: bytes, *, patience_s: float
    ) -> tuple[ServedModel, Request]:
        """The model that serves ``call``, and the request as admission and routing see it.

        ``patience_s`` is the longest wait for a replica, unless the client sets a shorter one. Raises
        :class:`gateway.protocol.errors.Refused` for a model that is not served, or not on this route.
        """
        given = given_session(call.headers, body)
        served, adapter = self._resolve(
            call, body.model, principal, given.id if given is not None and given.of_one_user else None
        )
        if "echo" in body.members and served.engine is _EXTERNAL:
            _check_echo(served, call.route, body)
        account, name, route = principal.account, served.name, call.route
        tenant = account.name
        if route.runner is None:
            prompt, session = NOTHING, 0
        else:
            limit = 1 if served.runner is _POOLING else limit_of(body)
            if limit is None and route.path == COMPLETIONS and served.engine is not _EXTERNAL:
                limit = DEFAULT_COMPLETION_TOKENS
            prompt = self.routers.densities[name].read(
                0 if served.runner is _POOLING else seed_of(name, adapter, tenant),
                canonical_prompt(body, route, raw),
                limit,
                body.choices,
            )
            session = session_key(account.key, given, prompt.opening)
        now = self._clock()
        return served, Request(
            name,
            tenant,
            account.priority,
            adapter,
            adapter_key(name, adapter) if adapter else 0,
            prompt.prompt_tokens,
            prompt.output_tokens,
            prompt.prefix,
            prompt.depths,
            session,
            len(raw),
            now,
            now + call.timeout_s(patience_s),
            limit_tokens=prompt.limit_tokens,
            long_tokens=prompt.long_tokens,
            prompt_bytes=prompt.prompt_bytes,
        )

    def _resolve(
        self, call: RequestContext, name: str, principal: Principal, session: bytes | None
    ) -> tuple[ServedModel, str]:
        """The model that a call names, and the adapter if it names one, as its replicas call it."""
        served, adapter, route = self.fleet.get(name), "", call.route
        if served is None or not principal.may_use(served.name):
            served, adapter = self._adapter(call, name, principal, session)
        if route.runner is not None and served.runner is not route.runner:
            raise Refused(
                Refusal.UNSUPPORTED,
                f"{route.path} needs a model with runner '{route.runner}'; "
                f"{served.name} has runner '{served.runner}'.",
                param="model",
            )
        return served, adapter

    def _adapter(
        self, call: RequestContext, name: str, principal: Principal, session: bytes | None
    ) -> tuple[ServedModel, str]:
        """The adapter; one that the client may not see is answered exactly like one that does not exist."""
        adapter = self.catalog.resolve(name, principal, session)
        if adapter is not None and (served := self.fleet.get(adapter.model)) is not None:
            call.adapter = adapter
            return served, adapter.served
        listed = self.fleet.listing(name)
        if listed is not None and principal.may_use(listed[0].name, listed[1]):
            return listed
        if self.catalog.wanted and not self.catalog.known:
            raise Refused(Refusal.STARTING, "The gateway has not received the adapter catalog yet.")
        raise unknown(name)


def _check_echo(served: ServedModel, route: ProxyRoute, body: RequestBody) -> None:
    """Refuse what ends a vLLM with adapters (:func:`serve.engine.vllm.check`), of servers of others."""
    if wants_prompt_logprobs(body.members, route.path) and served.listed:
        message = (
            f"log probabilities of a prompt (echo with logprobs) are not available on {served.name}, "
            "a model with adapters."
        )
        raise Refused(Refusal.BAD_REQUEST, message, param="echo")
