"""The accounting process's API as the admin port calls it, with errors in the gateway's envelope.

Statuses and codes are in :mod:`policy.wire.controller`. No answer is 503 ``accounting_unreachable``: requests
are served without the accounting process, but neither tenants nor keys can be changed or listed.
"""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from gateway.api.controller_proxy import CONNECT_S, SILENT_S, refusal_of
from gateway.http.internal_client import NO_CERTIFICATES
from gateway.protocol.errors import Refused
from policy.errors import Refusal
from policy.wire.accounting_api import AuditActor, actor_headers


class AccountingProxy:
    """A client of the accounting process of this host, at its Unix socket."""

    def __init__(self, socket: Path) -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=os.fspath(socket), verify=NO_CERTIFICATES),
            base_url="http://accounting",
            timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S),
        )

    async def ask(self, method: str, path: str, body: bytes = b"", *, actor: AuditActor) -> bytes:
        """The body of a 200 answer; raises :class:`gateway.protocol.errors.Refused` for any other."""
        try:
            answer = await self._http.request(method, path, content=body, headers=actor_headers(actor))
        except httpx.HTTPError as error:
            raise Refused(
                Refusal.NO_REPLICA,
                f"The accounting process does not answer ({type(error).__name__}): tenants and keys cannot be"
                " changed or listed. Requests are served as before.",
                code="accounting_unreachable",
            ) from error
        if answer.status_code != 200:
            raise refusal_of(answer.content)
        return answer.content
