"""The accounting process's HTTP API on its Unix socket: paths, changes of tenants and keys, and answers.

Instants are Unix seconds. A caller of the socket says for whom it acts by :data:`ACTOR_HEADER` and
:data:`ROLE_HEADER`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote, unquote

import msgspec

from policy.config.control import Section
from policy.config.tenancy import AccessPolicy, Tenant
from policy.types import Priority

View = TypeVar("View")

KEYS: Final = "/keys"
TENANTS: Final = "/tenants"
ADMIN_KEYS: Final = "/admin-keys"
AUDIT: Final = "/audit"
USAGE: Final = "/usage"
LEDGER: Final = "/ledger"
READY: Final = "/readyz"

ACTOR_HEADER: Final = "x-tidegate-actor"
ROLE_HEADER: Final = "x-tidegate-role"


class AdminRole(StrEnum):
    """What an admin key may do: read, also operate the fleet, also change tenants and keys."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def allows(self, needed: AdminRole) -> bool:
        """Whether this role includes ``needed``."""
        order = list(AdminRole)
        return order.index(self) >= order.index(needed)


class AuditActor(msgspec.Struct, frozen=True):
    """Who makes a change, and in which role."""

    name: str
    role: AdminRole


class TenantView(AccessPolicy, frozen=True, kw_only=True):
    """A tenant with its limits. ``declared``: by the deployment file; ``keys``: how many are valid."""

    name: str
    declared: bool
    blocked: bool = False
    created: float | None = None
    keys: int = 0
    weight: float = 1.0
    priority: Priority = Priority.STANDARD
    admin: bool = False


class KeyView(AccessPolicy, frozen=True, kw_only=True):
    """A key without itself: ``state`` is ``valid``, ``expired``, ``revoked`` or ``blocked`` (its tenant is).

    Of a declared key ``created`` is unknown, and its limits are those of its tenant alone.
    """

    id: str
    tenant: str
    state: str
    declared: bool = False
    alias: str = ""
    created: float | None = None
    expires: float | None = None
    revoked: float | None = None


class CreateKey(AccessPolicy, frozen=True, kw_only=True):
    """A key to make for ``tenant``, valid until ``expires`` or for ``duration`` (``30d``)."""

    tenant: str
    alias: str = ""
    expires: float | None = None
    duration: str | None = None


class RotateKey(Section, frozen=True, kw_only=True):
    """A key to replace by a new one with the same settings; the old one stays valid for ``grace_s``."""

    grace_s: float = 0.0


class CreateTenant(Tenant, frozen=True, kw_only=True):
    """A tenant to make; its keys are made apart."""

    blocked: bool = False


class AdminKeyView(msgspec.Struct, frozen=True, kw_only=True):
    """An admin key without the key; ``state`` as that of :class:`KeyView`."""

    id: str
    name: str
    role: AdminRole
    state: str
    created: float
    expires: float | None = None
    revoked: float | None = None


class CreatedKey(msgspec.Struct, Generic[View], frozen=True, kw_only=True):
    """A new key: ``key`` is shown here and never again; ``view`` is the rest of it."""

    key: str
    view: View


class CreateAdminKey(Section, frozen=True, kw_only=True):
    """An admin key to make, valid until ``expires`` or for ``duration``."""

    name: str
    role: AdminRole
    expires: float | None = None
    duration: str | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was made: ``before`` and ``after`` are what ``target`` was and became, if it was at all.

    ``action`` names the kind of target and the verb, as in ``key.revoke``.
    """

    number: int = 0
    at: float
    actor: str
    role: str
    action: str
    target: str
    before: Any = None
    after: Any = None


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The ``last`` entries, newest first: of one ``actor``, of a ``target``, of actions that begin so."""

    last: int = 100
    actor: str | None = None
    target: str | None = None
    action: str | None = None
    since: float | None = None
    before_number: int | None = None


def actor_headers(actor: AuditActor) -> dict[str, str]:
    """The headers by which a caller of an internal API says for whom it acts."""
    return {ACTOR_HEADER: quote(actor.name), ROLE_HEADER: actor.role.value}


def actor_in(headers: Mapping[str, str], unnamed: str) -> AuditActor:
    """The actor that :func:`actor_headers` named; ``unnamed`` for a caller of this machine without one."""
    name = unquote(headers.get(ACTOR_HEADER, ""))
    role = headers.get(ROLE_HEADER, "")
    return AuditActor(name or unnamed, AdminRole(role) if role in list(AdminRole) else AdminRole.ADMIN)


def item_path(collection: str, name: str, change: str = "") -> str:
    """The path of one item of a collection, or of a ``change`` of it."""
    return f"{collection}/{quote(name, safe='')}{'/' + change if change else ''}"
