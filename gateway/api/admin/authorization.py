"""Access to the admin port: by a host name of its own, from no other web site, with its token or a key.

The token of the state directory has the role admin; admin keys of the database have a role each.

A page of any site can make its visitor's browser send requests here, also by a name of that site which
resolves to this machine. It can neither choose the Host header, which has that name, nor read the token.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.dependencies import ACTOR, STILL_ALLOWED
from gateway.protocol.errors import Refused
from policy.config.deployment import GatewayConfig
from policy.config.port_conflicts import WILDCARDS
from policy.errors import Refusal
from policy.wire.accounting_api import AdminRole, AuditActor

# Served without the token: probes and Prometheus, and the schema and the page, which have no data, with their
# files.
OPEN = frozenset({"/livez", "/readyz", "/metrics", "/openapi.json", "/docs", "/"})
_OPEN_BELOW = ("/docs/", "/page/", "/apis/external.metrics.k8s.io/")
# What an operator may change.
_OPERATIONS = ("/admin/scale", "/admin/mode", "/admin/adapters", "/admin/playground")

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?")


def needed_role(method: str, path: str) -> AdminRole:
    """The least role for a request: what is not known as an operation needs the highest."""
    if method in ("GET", "HEAD"):
        return AdminRole.VIEWER
    return AdminRole.OPERATOR if path.startswith(_OPERATIONS) else AdminRole.ADMIN


class AdminAuthorization:
    """Middleware that answers 403 to a foreign Host or Origin or a role too low, 401 without token or key."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: Callable[[], str],
        actor: Callable[[bytes], AuditActor | None],
        gateway: Callable[[], GatewayConfig],
    ) -> None:
        self._app = app
        self._actor_of_key = actor
        self._token = token
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._check(scope)
        if refused is None:
            await self._app(scope, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in refused.headers()}
        await Response(refused.body(), refused.status, headers)(scope, receive, send)

    def _check(self, scope: Scope) -> Refused | None:
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        # Load balancers probe by HTTP/1.0 without a Host; a browser always sends one.
        if (hosts or scope["http_version"] != "1.0") and not (len(hosts) == 1 and self._is_ours(hosts[0])):
            return Refused(
                Refusal.BAD_REQUEST,
                "The admin port is not called by this host name: gateway.admin_allowed_hosts may list it.",
                status=403,
                code="foreign_host",
            )
        path: str = scope["path"]
        if path in OPEN or path.startswith(_OPEN_BELOW):
            return None
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is not None and [origin.decode("latin-1").lower().partition("://")[2]] != hosts:
            return Refused(
                Refusal.BAD_REQUEST,
                "This request comes from another site.",
                status=403,
                code="foreign_origin",
            )
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        actor = self._actor(given.strip()) if scheme.lower() == b"bearer" else None
        if actor is None:
            return Refused(
                Refusal.UNAUTHORIZED,
                "This needs the token in the file admin-token of the state directory, or an admin key: send"
                " it as 'Authorization: Bearer TOKEN'.",
                code="invalid_admin_token",
            )
        needed = needed_role(scope["method"], path)
        if not actor.role.allows(needed):
            return Refused(
                Refusal.UNAUTHORIZED,
                f"This needs an admin key with the role {needed}; this one has the role {actor.role}.",
                status=403,
                code="role_too_low",
            )
        scope[ACTOR] = actor
        scope[STILL_ALLOWED] = partial(self._allows, given.strip(), needed)
        return None

    def _allows(self, given: bytes, needed: AdminRole) -> bool:
        """Whether this token or key is valid now, with a role that is enough."""
        actor = self._actor(given)
        return actor is not None and actor.role.allows(needed)

    def _actor(self, given: bytes) -> AuditActor | None:
        if hmac.compare_digest(given, self._token().encode()):
            return AuditActor("admin token", AdminRole.ADMIN)
        return self._actor_of_key(given)

    def _is_ours(self, given: str) -> bool:
        """Whether a Host header in lower case has a name of this port."""
        match = _HOST.fullmatch(given)
        if match is None:
            return False
        host = match[1] or match[2]
        gateway = self._gateway()
        own = gateway.admin_host.lower()
        if host in ("localhost", own, *map(str.lower, gateway.admin_allowed_hosts)):
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False
        # Only a name can be made to resolve to this machine: an address leads to who has it.
        return address.is_loopback or own in WILDCARDS
