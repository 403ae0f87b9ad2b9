"""Tenants: the API key of a request, looked up by digest, decides its tenant, weight and priority."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf
from typing import Any, Final

from gateway.intake.principal import Principal, WorkerTenant
from gateway.protocol.errors import Refused
from gateway.protocol.usage import TokenUsage
from gateway.routing.shared_counters import SharedCounts
from gateway.telemetry.tenant_metrics import TenantMetrics
from policy.config.deployment import Deployment
from policy.config.port_conflicts import may_be_open
from policy.config.tenancy import AccessPolicy, Tenant
from policy.errors import Refusal
from policy.wire.access_snapshot import KeyRow, TenantRow
from store.key_derivation import salt_of

# A key of the deployment file is limited by its tenant alone.
NO_LIMITS = AccessPolicy()
# Accounts whose counts are shared or described in one turn of the event loop.
ACCOUNTS_A_TURN: Final = 512
_sha256: Final = hashlib.sha256
_MISSING: Final = "This server requires an API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key'."
_WRONG: Final = "The API key is not valid."
_EXPIRED: Final = "The API key has expired."
_COUNTS = ("in_flight", "prompt_tokens", "output_tokens")
_DESCRIBED = ("name", "weight", "priority", "admin", *_COUNTS)


class AccessDraft:
    """Tenants and keys of the database as they are read, line by line, before they replace the last ones.

    ``declared`` are the tenants of the deployment file, which count before those of the same name here.
    """

    def __init__(self, tenants: TenantDirectory, declared: Mapping[str, Tenant]) -> None:
        self._tenants = tenants
        self._declared = declared
        self.tenants: dict[str, Tenant] = {}
        self.accounts: dict[str, WorkerTenant] = {}
        self.keys: dict[bytes, Principal] = {}

    def add_tenant(self, row: TenantRow) -> None:
        """Take a tenant; the keys of a blocked one are left out."""
        name = row.tenant.name
        self.tenants[name] = row.tenant
        if not row.blocked and name not in self._declared:
            self.accounts[name] = self._tenants.account(name)

    def add_key(self, row: KeyRow) -> None:
        """Take a key, after its tenant."""
        declared = self._declared.get(row.tenant)
        account = self._tenants.account(row.tenant) if declared is not None else self.accounts.get(row.tenant)
        if account is not None:
            access = (declared or self.tenants[row.tenant], row.access)
            expires = inf if row.expires is None else row.expires
            key = Principal(account, row.id, access, expires, row.first_id)
            self.keys[bytes.fromhex(row.sha256)] = key


class TenantDirectory:
    """The accounts of the deployment file and of the database.

    Without tenants every request is the anonymous one's, unless other machines reach the port.
    ``salt_secret`` makes cache salts; ``own_key`` is Tidegate's own, of no tenant. ``anonymous`` is who has
    no tenant, ``operator`` who may use the admin port. ``wall`` gives Unix seconds, at which keys expire.
    ``changed`` counts deployment files. Keys are digested for each request (under a microsecond), so that
    none is kept in memory.
    """

    def __init__(
        self,
        salt_secret: bytes,
        own_key: str,
        metrics: TenantMetrics,
        shared: SharedCounts,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._secret = salt_secret
        self._own = hashlib.sha256(own_key.encode()).digest()
        self._metrics = metrics
        self._shared = shared
        self._wall = wall
        self.anonymous, self.operator = (Principal(WorkerTenant("", b"")) for _ in range(2))
        for principal in (self.anonymous, self.operator):
            principal.account.count_as(metrics.of(""))
        self.operator.account.admin = True
        self.changed = 0
        self._declared: dict[str, Tenant] = {}
        self._declared_keys: dict[bytes, Principal] = {}
        self._stored: dict[str, Tenant] = {}
        self._keys: dict[bytes, Principal] = {}
        self._by_name: dict[str, WorkerTenant] = {}
        self._may_be_open = False
        self._required = True

    def read(self, deployment: Deployment) -> None:
        """Take the tenants of the deployment; requests in flight go on."""
        for principal in (self.anonymous, self.operator):
            principal.account.priority = deployment.gateway.priority
        accounts = {name: account for name, account in self._by_name.items() if name in self._stored}
        declared = {tenant.name: tenant for tenant in deployment.tenants}
        keys = {}
        for name, tenant in declared.items():
            account = accounts[name] = self.account(name)
            account.read(tenant)
            for digest in tenant.keys_sha256:
                key_id = f"declared-{digest[:12]}"
                keys[bytes.fromhex(digest)] = Principal(account, key_id, (tenant, NO_LIMITS))
        self._by_name, self._declared, self._declared_keys = accounts, declared, keys
        self._may_be_open = may_be_open(deployment.gateway)
        self._require()
        self.changed += 1

    def draft(self) -> AccessDraft:
        """What the database has instead of the last, to be filled and then taken."""
        return AccessDraft(self, self._declared)

    def take(self, draft: AccessDraft) -> None:
        """Replace the tenants and keys of the database; requests in flight go on."""
        for name, account in draft.accounts.items():
            account.read(draft.tenants[name])
        declared = {name: account for name, account in self._by_name.items() if name in self._declared}
        self._by_name = draft.accounts | declared
        self._stored, self._keys = draft.tenants, draft.keys
        self._require()

    def account(self, name: str) -> WorkerTenant:
        """The account of a tenant, with its counts if it had one before."""
        account = self._by_name.get(name)
        return account or WorkerTenant(name, self._salt(name))

    def of(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Who a request is; raises :class:`gateway.protocol.errors.Refused` without a valid key."""
        if not self._required:
            return self.anonymous
        key = _key_of(headers)
        if not key:
            raise Refused(Refusal.UNAUTHORIZED, _MISSING)
        # By digest, so that the time of a lookup leaks nothing about a key.
        digest = _sha256(key).digest()
        principal = self._declared_keys.get(digest) or self._keys.get(digest)
        if principal is None:
            if digest != self._own:
                raise Refused(Refusal.UNAUTHORIZED, _WRONG)
            return self.anonymous
        if principal.expires != inf and principal.expires <= self._wall():
            raise Refused(Refusal.UNAUTHORIZED, _EXPIRED)
        account = principal.account
        if not account.labelled:
            # Labels are few: a tenant takes one when it first sends a request.
            account.count_as(self._metrics.of(account.name))
        return principal

    def principals(self) -> Iterator[Principal]:
        """Who has a key: of the deployment file, then of the database."""
        yield from self._declared_keys.values()
        yield from self._keys.values()

    def is_own(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request has Tidegate's own key."""
        return hashlib.sha256(_key_of(headers) or b"").digest() == self._own

    def weight(self, name: str) -> float:
        """The weight of the tenant called ``name``; 1 for one that was removed."""
        account = self._by_name.get(name)
        return 1.0 if account is None else account.weight

    def salt(self, name: str) -> bytes:
        """The prefix cache salt of a tenant, as a JSON string, also of one that was removed."""
        account = self._by_name.get(name)
        return self._salt(name) if account is None and name else (account or self.anonymous.account).salt

    def served(self, name: str, usage: TokenUsage) -> None:
        account = self._by_name.get(name, self.anonymous.account)
        account.prompt_tokens += usage.prompt
        account.output_tokens += usage.completion
        account.counters.tokens.count(usage)

    def share(self) -> Iterator[None]:
        """Report the accounts' counts to the other workers of the host, some with each step."""
        for number, account in enumerate(self._accounts(), 1):
            if number % ACCOUNTS_A_TURN == 0:
                yield
            self._shared.set_tenant(
                account.key, account.in_flight, account.prompt_tokens, account.output_tokens
            )

    async def describe(self) -> list[dict[str, Any]]:
        """The accounts with their counts over the workers of the host since they started, without keys.

        Of the database, those that have counts. Thousands take several turns of the event loop.
        """
        described = []
        for number, account in enumerate(self._accounts(), 1):
            if number % ACCOUNTS_A_TURN == 0:
                await asyncio.sleep(0)
            entry = {name: getattr(account, name) for name in _DESCRIBED}
            in_flight, prompt, output = self._shared.tenant_of_others(account.key)
            entry["in_flight"] += in_flight
            entry["prompt_tokens"] += prompt
            entry["output_tokens"] += output
            if account.name not in self._stored or any(entry[name] for name in _COUNTS):
                described.append(entry)
        return described

    def _accounts(self) -> Collection[WorkerTenant]:
        return self._by_name.values() if self._required else (self.anonymous.account,)

    def _require(self) -> None:
        """Without tenants no key is needed, where that is safe or allowed."""
        self._required = bool(self._declared or self._stored) or not self._may_be_open

    def _salt(self, name: str) -> bytes:
        return b'"%b"' % salt_of(self._secret, name).encode()


def _key_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    key = headers.get(b"authorization")
    if key is not None and (key[:7] == b"Bearer " or key[:7].lower() == b"bearer "):
        return key[7:].strip()
    return headers.get(b"x-api-key")
