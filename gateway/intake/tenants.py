"""Tenants: the API key of a request, looked up by digest, decides its tenant, weight and priority."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from gateway.protocol.errors import Refused
from gateway.protocol.usage import Usage
from gateway.routing.shared_counters import SharedCounts
from gateway.telemetry.tenant_metrics import TenantCounters, TenantMetrics
from policy.config.deployment import Deployment
from policy.config.tenancy import Tenant
from policy.errors import Refusal
from policy.hashing import hash_name
from policy.types import Priority
from store.api_keys import salt_of

_MISSING = "This server requires an API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key'."
_WRONG = "The API key is not valid."
_DESCRIBED = ("name", "weight", "priority", "admin", "in_flight", "prompt_tokens", "output_tokens")


class TenantAccount:
    """A tenant in this worker. ``salt`` (a JSON string, empty without tenants) isolates its prefix cache.

    ``counters`` are those of its label in metrics.
    """

    def __init__(self, name: str, salt: bytes, counters: TenantCounters | None = None) -> None:
        self.name = name
        self.salt = salt
        self.counters = counters or TenantCounters()
        self.key = hash_name(f"tenant {name}")
        self.weight = 1.0
        self.priority = Priority.STANDARD
        self.admin = False
        self.in_flight = 0
        self.prompt_tokens = 0
        self.output_tokens = 0

    def read(self, tenant: Tenant) -> None:
        self.weight, self.priority, self.admin = tenant.weight, tenant.priority, tenant.admin


class Tenants:
    """The accounts of the current deployment; without tenants every request is the anonymous one's.

    ``salt_secret`` makes the cache salts; ``own_key`` is Tidegate's own, of no tenant. ``anonymous`` counts
    requests without a tenant, ``operator`` is who has the token of the admin port. Keys are digested for each
    request (under a microsecond), so that none is kept in memory and a revoked one ends with its deployment.
    """

    def __init__(
        self, salt_secret: bytes, own_key: str, metrics: TenantMetrics, shared: SharedCounts
    ) -> None:
        self._secret = salt_secret
        self._own = hashlib.sha256(own_key.encode()).digest()
        self._metrics = metrics
        self._shared = shared
        self.anonymous = TenantAccount("", b"", metrics.of(""))
        self.operator = TenantAccount("", b"", metrics.of(""))
        self.operator.admin = True
        self._by_name: dict[str, TenantAccount] = {}
        self._by_digest: dict[bytes, TenantAccount] = {}

    def read(self, deployment: Deployment) -> None:
        """Take the tenants of the deployment; requests in flight go on."""
        self.anonymous.priority = self.operator.priority = deployment.gateway.priority
        accounts: dict[str, TenantAccount] = {}
        digests = {self._own: self.anonymous} if deployment.tenants else {}
        for tenant in deployment.tenants:
            account = self._by_name.get(tenant.name)
            if account is None:
                account = TenantAccount(tenant.name, self._salt(tenant.name), self._metrics.of(tenant.name))
            account.read(tenant)
            accounts[tenant.name] = account
            digests |= {bytes.fromhex(digest): account for digest in tenant.keys_sha256}
        self._by_name, self._by_digest = accounts, digests

    def of(self, headers: Mapping[bytes, bytes]) -> TenantAccount:
        """The account of a request; raises :class:`gateway.protocol.errors.Refused` without a valid key."""
        if not self._by_digest:
            return self.anonymous
        key = _key_of(headers)
        if not key:
            raise Refused(Refusal.UNAUTHORIZED, _MISSING)
        # By digest, so that the time of a lookup leaks nothing about a key.
        account = self._by_digest.get(hashlib.sha256(key).digest())
        if account is None:
            raise Refused(Refusal.UNAUTHORIZED, _WRONG)
        return account

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
        return self._salt(name) if account is None and name else (account or self.anonymous).salt

    def served(self, name: str, usage: Usage) -> None:
        account = self._by_name.get(name, self.anonymous)
        account.prompt_tokens += usage.prompt
        account.output_tokens += usage.completion
        account.counters.tokens.count(usage)

    def share(self) -> None:
        """Report the accounts' counts to the other workers of the host."""
        for account in self._accounts():
            self._shared.set_tenant(
                account.key, account.in_flight, account.prompt_tokens, account.output_tokens
            )

    def describe(self) -> list[dict[str, Any]]:
        """Every account with its counts over the workers of the host since they started, without its keys."""
        described = []
        for account in self._accounts():
            entry = {name: getattr(account, name) for name in _DESCRIBED}
            in_flight, prompt, output = self._shared.tenant_of_others(account.key)
            entry["in_flight"] += in_flight
            entry["prompt_tokens"] += prompt
            entry["output_tokens"] += output
            described.append(entry)
        return described

    def _accounts(self) -> Collection[TenantAccount]:
        return self._by_name.values() if self._by_digest else (self.anonymous,)

    def _salt(self, name: str) -> bytes:
        return b'"%b"' % salt_of(self._secret, name).encode()


def _key_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    key = headers.get(b"authorization")
    if key is not None and key[:7].lower() == b"bearer ":
        return key[7:].strip()
    return headers.get(b"x-api-key")
