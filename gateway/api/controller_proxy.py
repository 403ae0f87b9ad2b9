"""The controller's HTTP API as the admin port calls it, with errors in the gateway's envelope.

Statuses and codes are in :mod:`policy.wire.controller`; ``param`` is the path of the value that an error is
about. No answer is 503 ``controller_unreachable``, a deployment without a controller 409 ``no_controller``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec

from gateway.http.internal_client import internal_client
from gateway.protocol.errors import Refused
from policy.config.deployment import Deployment
from policy.errors import Refusal
from policy.wire.accounting_api import AuditActor, actor_headers
from policy.wire.controller import STATUS, Controllers, answer_of

# An add reports its progress once a second.
SILENT_S = 30.0
CONNECT_S = 2.0
# The page waits 5 s for a live state, one of which is the pause between two.
LIVE_WITHIN_S = 3.0
# The status of a controller that does not lead.
STANDS_BY = answer_of("NotLeader").status


class ControllerProxy:
    """A client of the controller, whose address is in the current ``deployment``."""

    def __init__(
        self,
        secret: str,
        deployment: Callable[[], Deployment],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """``transport`` replaces the network, for tests."""
        self._deployment = deployment
        self._controllers = Controllers(deployment().cluster.controller)
        self._http = internal_client(secret, timeout=_timeout(SILENT_S), transport=transport)

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        actor: AuditActor | None = None,
        within_s: float | None = None,
    ) -> bytes:
        """The body of a 200 answer; raises :class:`gateway.protocol.errors.Refused` for any other.

        A controller that does not answer for :data:`SILENT_S` is given up; with ``within_s`` all of them have
        this time together.
        """
        headers = actor_headers(actor) if actor is not None else None
        addresses = self._addresses()
        timeout = _timeout(SILENT_S if within_s is None else within_s / len(addresses))
        why = ""
        for address in addresses:
            try:
                answer = await self._http.request(
                    method, f"http://{address}{path}", content=body, headers=headers, timeout=timeout
                )
            except httpx.HTTPError as error:  # another one may lead
                why = type(error).__name__
                self._controllers.failed(address)
                # One that was asked for a change, and did not answer, may still carry it out.
                if method != "GET" and not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
                    raise self._unreachable(why) from error
                continue
            if answer.status_code == STANDS_BY:
                why = "no controller leads"
                continue
            self._controllers.answered(address)
            if answer.status_code != 200:
                raise refusal_of(answer.content)
            return answer.content
        raise self._unreachable(why)

    async def lines(
        self, path: str, body: bytes, end: str, *, actor: AuditActor
    ) -> AsyncIterator[dict[str, Any]]:
        """The lines of an answer that reports progress; the last one has the member ``end``.

        Raises :class:`gateway.protocol.errors.Refused` for an error line, and when the controller goes away.
        """
        if len(self._addresses()) > 1:
            await self.ask("GET", STATUS)  # finds the one that leads
        url = f"http://{self._addresses()[0]}{path}"
        try:
            async with self._http.stream("POST", url, content=body, headers=actor_headers(actor)) as answer:
                if answer.status_code != 200:
                    raise refusal_of(await answer.aread())
                rest = b""
                async for data in answer.aiter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        members = msgspec.json.decode(line, type=dict[str, Any])
                        if "error" in members:
                            raise refusal_of(line)
                        yield members
                        if end in members:
                            return
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise self._unreachable(type(error).__name__) from error
        raise self._unreachable("its answer has no end")

    def _addresses(self) -> tuple[str, ...]:
        """The controllers, the one that led last first."""
        deployment = self._deployment()
        if not deployment.needs_controller:
            raise Refused(
                Refusal.UNSUPPORTED,
                "There is no controller: neither the servers here nor their adapters are Tidegate's.",
                status=409,
                code="no_controller",
            )
        if self._controllers.all != deployment.cluster.controllers:
            self._controllers = Controllers(deployment.cluster.controller)
        return self._controllers.in_turn()

    def _unreachable(self, why: str) -> Refused:
        address = self._deployment().cluster.controller
        return Refused(
            Refusal.NO_REPLICA,
            f"The controller at {address} does not answer ({why}); the operation may still be carried out.",
            code="controller_unreachable",
        )


def _timeout(silent_s: float) -> httpx.Timeout:
    return httpx.Timeout(silent_s, connect=min(CONNECT_S, silent_s))


def refusal_of(body: bytes) -> Refused:
    """The error in an answer of the controller, or in the last line of one."""
    try:
        problem: dict[str, Any] = msgspec.json.decode(body)["error"]
        kind, message = str(problem["type"]), str(problem["message"])
    except (ValueError, LookupError, TypeError):
        problem, kind, message = {}, "", "The controller's answer cannot be decoded."
    _, status, code = answer_of(kind)
    return Refused(
        Refusal.UPSTREAM_FAILED if status >= 500 else Refusal.BAD_REQUEST,
        message,
        param=str(problem.get("path") or "") or None,
        status=status,
        code=str(problem.get("code") or code),
    )
