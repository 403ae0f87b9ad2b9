"""Tenants: those that the deployment file declares are shown, those of the database can be changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs, to_builtins

from gateway.accounting.access_transaction import AccessDatabase, AccessTransaction, access_of
from policy.config.convert import convert, require
from policy.config.tenancy import Tenant
from policy.config.tenancy_checks import check_access, check_name
from policy.errors import AccessRefused, AccessUnknown
from policy.wire.accounting_api import AuditActor, CreateTenant, TenantView
from store.tenancy.keys import end_key, every_key, valid_by_tenant
from store.tenancy.tenants import (
    TenantRecord,
    count_tenants,
    delete_tenant,
    every_tenant,
    find_tenant,
    insert_tenant,
    update_tenant,
)

# What a worker keeps in memory, of one database.
MAX_TENANTS = 5_000


class TenantChanges:
    """What the routes of tenants do."""

    def __init__(self, database: AccessDatabase) -> None:
        self._database = database

    def every(self) -> list[TenantView]:
        """All tenants, declared ones first. A declared one counts before one of the database."""
        declared = self._database.declared.tenants
        with self._database.reading() as connection:
            records = every_tenant(connection)
            keys = valid_by_tenant(connection, self._database.now())
        views = [_view(TenantRecord(tenant, False, 0.0), keys, declared=True) for tenant in declared.values()]
        return views + [_view(each, keys) for each in records if each.tenant.name not in declared]

    def one(self, name: str) -> TenantView:
        """The tenant called ``name``; raises :class:`policy.errors.AccessUnknown`."""
        for view in self.every():
            if view.name == name:
                return view
        raise _unknown(name)

    def create(self, wanted: CreateTenant, actor: AuditActor) -> TenantView:
        """Make a tenant, without keys: those that a tenant of this name left are revoked."""
        check_name("name", wanted.name)
        require(not wanted.keys_sha256, "keys_sha256", "***", "nothing: keys of the database are made apart")
        check_access("", wanted, self._database.declared.models)
        tenant = Tenant(**{name: getattr(wanted, name) for name in Tenant.__struct_fields__})
        with self._database.changing(actor) as change:
            if wanted.name in self._database.declared.tenants:
                raise AccessRefused(f"the deployment file declares a tenant {wanted.name!r}")
            if find_tenant(change.connection, wanted.name) is not None:
                raise AccessRefused(f"there is a tenant {wanted.name!r} already")
            if count_tenants(change.connection) >= MAX_TENANTS:
                raise AccessRefused(f"there are {MAX_TENANTS} tenants already, the most that workers keep")
            # Of a tenant that the deployment file declared before: who has them is nobody's present tenant.
            _revoke_keys(change, wanted.name)
            record = TenantRecord(tenant, wanted.blocked, change.now)
            insert_tenant(change.connection, record)
            view = _view(record, {})
            change.record("tenant.create", wanted.name, after=_settings(record))
        return view

    def update(self, name: str, patch: Mapping[str, Any], actor: AuditActor) -> TenantView:
        """Set the members of ``patch`` (``null`` removes a limit); the others stay."""
        for key in ("name", "keys_sha256"):
            require(key not in patch, key, "***" if key == "keys_sha256" else patch.get(key), "nothing")
        with self._database.changing(actor) as change:
            before = self._of_database(change, name)
            merged = {**_settings(before), **patch, "name": name}
            set_ = {key: value for key, value in merged.items() if value is not None}
            given = convert(set_, CreateTenant, "")
            # A tenant that names a model of the past can be blocked and limited all the same.
            check_access("", given, self._database.declared.models if "models" in patch else None)
            tenant = Tenant(**{key: getattr(given, key) for key in Tenant.__struct_fields__})
            record = TenantRecord(tenant, given.blocked, before.created)
            update_tenant(change.connection, record)
            keys = valid_by_tenant(change.connection, change.now)
            change.record("tenant.update", name, before=_settings(before), after=_settings(record))
        return _view(record, keys)

    def delete(self, name: str, actor: AuditActor) -> TenantView:
        """Delete a tenant and revoke its keys; returns what it was.

        Of a tenant that the deployment file declared before, only the keys are there.
        """
        with self._database.changing(actor) as change:
            keys = valid_by_tenant(change.connection, change.now)
            if name not in self._database.declared.tenants and find_tenant(change.connection, name) is None:
                if name not in keys:
                    raise _unknown(name)
                _revoke_keys(change, name)
                past = TenantRecord(Tenant(name=name), False, change.now)
                return structs.replace(_view(past, keys), created=None)
            record = self._of_database(change, name)
            _revoke_keys(change, name)
            delete_tenant(change.connection, name)
            change.record("tenant.delete", name, before=_settings(record))
        return _view(record, keys)

    def _of_database(self, change: AccessTransaction, name: str) -> TenantRecord:
        if name in self._database.declared.tenants:
            raise AccessRefused(f"tenant {name!r} is declared: change it in the deployment file")
        record = find_tenant(change.connection, name)
        if record is None:
            raise _unknown(name)
        return record


def _revoke_keys(change: AccessTransaction, tenant: str) -> None:
    for key in every_key(change.connection, tenant=tenant):
        # Expired ones too: the clock may be set back.
        if key.revoked is not None:
            continue
        end_key(change.connection, structs.replace(key, revoked=change.now))
        change.record("key.revoke", key.id, before={"tenant": tenant, "alias": key.alias})


def _unknown(name: str) -> AccessUnknown:
    return AccessUnknown(f"there is no tenant {name!r}")


def _settings(record: TenantRecord) -> dict[str, Any]:
    """What was set of a tenant, beside its name."""
    nothing = Tenant(name=record.tenant.name, keys_sha256=record.tenant.keys_sha256)
    unset: dict[str, Any] = to_builtins(nothing)
    settings = {name: value for name, value in to_builtins(record.tenant).items() if value != unset[name]}
    return settings | ({"blocked": True} if record.blocked else {})


def _view(record: TenantRecord, keys: Mapping[str, int], *, declared: bool = False) -> TenantView:
    tenant = record.tenant
    return TenantView(
        **structs.asdict(access_of(tenant)),
        name=tenant.name,
        declared=declared,
        blocked=record.blocked,
        created=None if declared else record.created,
        keys=keys.get(tenant.name, 0) + len(tenant.keys_sha256),
        weight=tenant.weight,
        priority=tenant.priority,
        admin=tenant.admin,
    )
