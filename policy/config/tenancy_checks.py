"""Checks of tenants and of what a tenant or a key may use, in the deployment file and in the database."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import msgspec

from policy.config.convert import did_you_mean, require
from policy.config.deployment import ENTRY_NAME
from policy.config.tenancy import AccessPolicy, LimitName, Tenant
from policy.duration import PERIOD, parse_period

# Of one tenant or key, as JSON: every worker keeps the lists of all keys in memory.
MAX_ACCESS_BYTES = 16 * 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_tenants(tenants: Sequence[Tenant], models: Collection[str]) -> None:
    """Check the section ``tenants``; raises :class:`policy.errors.ConfigError`."""
    names: set[str] = set()
    owners: dict[str, str] = {}
    for i, tenant in enumerate(tenants):
        at = f"tenants[{i}]"
        check_name(f"{at}.name", tenant.name)
        require(tenant.name not in names, f"{at}.name", tenant.name, "a name that no other tenant has")
        names.add(tenant.name)
        check_access(f"{at}.", tenant, models)
        for j, digest in enumerate(tenant.keys_sha256):
            path = f"{at}.keys_sha256[{j}]"
            # A value of another form may be the key itself, so it is not shown.
            expected = "64 hex digits in lower case: the SHA-256 of a key"
            require(_DIGEST.fullmatch(digest), path, "***", expected)
            expected = f"a digest that is used once (tenant {owners.get(digest)!r} has it)"
            require(digest not in owners, path, f"{digest[:8]}...", expected)
            owners[digest] = tenant.name


def check_name(path: str, name: str) -> None:
    """Check the form of a tenant's name; raises :class:`policy.errors.ConfigError`."""
    require(ENTRY_NAME.fullmatch(name), path, name, f"a name that matches {ENTRY_NAME.pattern}")


def check_access(prefix: str, access: AccessPolicy, models: Collection[str] | None) -> None:
    """Check limits and permissions at paths that begin with ``prefix``; ``models``: the known ones.

    Raises :class:`policy.errors.ConfigError`.
    """
    duration = access.budget_duration
    good = duration is None or any(parse_period(duration))
    require(good, f"{prefix}budget_duration", duration, PERIOD)
    require(
        duration is None or access.max_budget is not None,
        f"{prefix}budget_duration", duration, "nothing without max_budget",
    )  # fmt: skip
    given = [limit.value for limit in LimitName if getattr(access, limit.value) is not None]
    for i, limit in enumerate(access.dry_run):
        expected = f"a limit that is set: {', '.join(given) or 'none is'}"
        require(limit.value in given, f"{prefix}dry_run[{i}]", limit.value, expected)
    known = access.models if models is None else models
    for i, model in enumerate(access.models):
        expected = f"one of the models: {did_you_mean(model, sorted(known))}"
        require(model in known, f"{prefix}models[{i}]", model, expected)
    size = len(msgspec.json.encode((access.models, access.adapters, access.metadata)))
    expected = f"at most {MAX_ACCESS_BYTES} bytes of JSON in models, adapters and metadata"
    require(size <= MAX_ACCESS_BYTES, prefix.rstrip(".") or "$", f"{size} bytes", expected)
