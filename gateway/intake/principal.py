"""The caller of a request: its tenant's account, its key, and what both may use."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from gateway.intake.shared_limits import subject_key
from gateway.telemetry.tenant_metrics import TenantCounters
from policy.config.tenancy import AccessPolicy, Tenant
from policy.hashing import hash_name
from policy.types import Priority


class WorkerTenant:
    """A tenant in this worker. ``salt`` (a JSON string, empty without tenants) isolates its prefix cache.

    ``counters`` are those of its label in metrics, once it is ``labelled``.
    """

    def __init__(self, name: str, salt: bytes) -> None:
        self.name = name
        self.salt = salt
        self.counters = TenantCounters()
        self.labelled = False
        self.key = hash_name(f"tenant {name}")
        self.weight = 1.0
        self.priority = Priority.STANDARD
        self.admin = False
        self.in_flight = 0
        self.prompt_tokens = 0
        self.output_tokens = 0

    def count_as(self, counters: TenantCounters) -> None:
        self.counters, self.labelled = counters, True

    def read(self, tenant: Tenant) -> None:
        self.weight, self.priority, self.admin = tenant.weight, tenant.priority, tenant.admin


class LimitSubject:
    """Whom limits are of: a tenant, or a key (``is_key``). ``key`` is the hash that they are counted by.

    ``first_name`` is that of the first of the keys that replaced each other, which are counted as one.
    """

    def __init__(self, name: str, first_name: str, access: AccessPolicy, *, is_key: bool) -> None:
        self.name = name
        self.key = subject_key(first_name, is_key=is_key)
        self.access = access
        self.is_key = is_key


class Principal:
    """An account and the key that identified it; it is replaced when what either may use changes.

    ``key_id`` is public: that of a key of the database, ``declared-`` and 12 hex digits of its digest for one
    of the deployment file, empty without a key. ``access`` is what its tenant and its key may use, in this
    order; it is empty where nothing is limited. ``models`` are the names that both allow (``None``: all),
    ``adapters`` the lists of those that name some, in which one adapter may be ``NAME`` or ``MODEL:NAME``.
    ``max_tokens`` is the longest answer, ``expires`` Unix seconds. ``limited`` are those of the two that have
    limits; a key's are counted as those of ``first_key_id``, which it replaced.
    """

    def __init__(
        self,
        account: WorkerTenant,
        key_id: str = "",
        access: tuple[AccessPolicy, ...] = (),
        expires: float = inf,
        first_key_id: str | None = None,
    ) -> None:
        self.account = account
        self.key_id = key_id
        self.access = access
        self.expires = expires
        self.models = _common([each.models for each in access if each.models])
        self.adapters = tuple([frozenset(each.adapters) for each in access if each.adapters])
        self.features = _common([each.features for each in access if each.features is not None])
        self.max_tokens = min(
            (each.max_tokens for each in access if each.max_tokens is not None), default=None
        )
        limited: list[LimitSubject] = []
        if access:
            of_tenant, of_key = access
            if _is_limited(of_tenant):
                limited.append(LimitSubject(account.name, account.name, of_tenant, is_key=False))
            if _is_limited(of_key):
                limited.append(LimitSubject(key_id, first_key_id or key_id, of_key, is_key=True))
        self.limited = tuple(limited)

    def may_use(self, model: str, adapter: str = "") -> bool:
        """Whether the model, or the adapter on it, is among those that tenant and key allow."""
        if self.models is not None and model not in self.models:
            return False
        if adapter:
            for allowed in self.adapters:
                if adapter not in allowed and f"{model}:{adapter}" not in allowed:
                    return False
        return True


def _is_limited(access: AccessPolicy) -> bool:
    """Whether any limit is set."""
    limits = (access.rpm_limit, access.tpm_limit, access.max_parallel_requests, access.max_budget)
    return any(limit is not None for limit in limits)


def _common(lists: list[Collection[str]]) -> frozenset[str] | None:
    """What is in all of ``lists``; ``None`` without any."""
    return frozenset(lists[0]).intersection(*lists[1:]) if lists else None
