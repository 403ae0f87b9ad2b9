"""Tenants: the API key of a request, looked up by digest, decides its tenant, weight and priority."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from gateway.intake.principal import Principal, TenantAccount
from gateway.protocol.errors import Refused
from gateway.protocol.usage import Usage
from gateway.routing.shared_counters import SharedCounts
from gateway.telemetry.tenant_metrics import TenantMetrics
from policy.config.deployment import Deployment
from policy.config.tenancy import Access
from policy.errors import Refusal
from store.api_keys import salt_of

# A key of the deployment file is limited by its tenant alone.
NO_LIMITS = Access()
_MISSING = "This server requires an API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key'."
_WRONG = "The API key is not valid."
_DESCRIBED = ("name", "weight", "priority", "admin", "in_flight", "prompt_tokens", "output_tokens")


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
        self.anonymous = Principal(TenantAccount("", b"", metrics.of("")))
        self.operator = Principal(TenantAccount("", b"", metrics.of("")))
        self.operator.account.admin = True
        self._by_name: dict[str, TenantAccount] = {}
        self._by_digest: dict[bytes, Principal] = {}

    def read(self, deployment: Deployment) -> None:
        """Take the tenants of the deployment; requests in flight go on."""
        for principal in (self.anonymous, self.operator):
            principal.account.priority = deployment.gateway.priority
        accounts: dict[str, TenantAccount] = {}
        digests = {self._own: self.anonymous} if deployment.tenants else {}
        for tenant in deployment.tenants:
            account = self._by_name.get(tenant.name)
            if account is None:
                account = TenantAccount(tenant.name, self._salt(tenant.name), self._metrics.of(tenant.name))
            account.read(tenant)
            accounts[tenant.name] = account
            for digest in tenant.keys_sha256:
                key_id = f"declared-{digest[:12]}"
                digests[bytes.fromhex(digest)] = Principal(account, key_id, (tenant, NO_LIMITS))
        self._by_name, self._by_digest = accounts, digests

    def of(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Who a request is; raises :class:`gateway.protocol.errors.Refused` without a valid key."""
        if not self._by_digest:
            return self.anonymous
        key = _key_of(headers)
        if not key:
            raise Refused(Refusal.UNAUTHORIZED, _MISSING)
        # By digest, so that the time of a lookup leaks nothing about a key.
        principal = self._by_digest.get(hashlib.sha256(key).digest())
        if principal is None:
            raise Refused(Refusal.UNAUTHORIZED, _WRONG)
        return principal

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

    def served(self, name: str, usage: Usage) -> None:
        account = self._by_name.get(name, self.anonymous.account)
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
        return self._by_name.values() if self._by_digest else (self.anonymous.account,)

    def _salt(self, name: str) -> bytes:
        return b'"%b"' % salt_of(self._secret, name).encode()


def _key_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    key = headers.get(b"authorization")
    if key is not None and key[:7].lower() == b"bearer ":
        return key[7:].strip()
    return headers.get(b"x-api-key")
