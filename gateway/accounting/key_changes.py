"""API keys and admin keys: made, shown once, replaced and revoked."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from msgspec import structs

from gateway.accounting.access_transaction import AccessDatabase, access_of, check_text, expiry
from policy.config.convert import require
from policy.config.tenancy import AccessPolicy, Tenant
from policy.config.tenancy_checks import check_access, check_name
from policy.errors import AccessRefused, AccessUnknown
from policy.wire.accounting_api import (
    AdminKeyView,
    AuditActor,
    CreateAdminKey,
    CreatedKey,
    CreateKey,
    KeyView,
)
from store.key_derivation import ADMIN_PREFIX, digest_of, new_key
from store.tenancy.keys import (
    AdminKeyRecord,
    KeyRecord,
    count_valid,
    end_key,
    every_admin_key,
    every_key,
    find_admin_key,
    find_key,
    insert_admin_key,
    insert_key,
    new_id,
    state_of,
)
from store.tenancy.tenants import every_tenant, find_tenant

# What a worker keeps in memory, of one database.
MAX_KEYS = 20_000
MAX_ADMIN_KEYS = 200
# The id of a key that the deployment file declares begins so, with the first digits of its digest.
DECLARED = "declared-"
_DIGITS = 12
_MAX_GRACE_S = 366 * 86_400.0


class KeyChanges:
    """What the routes of keys do; ids of declared keys begin with :data:`DECLARED`."""

    def __init__(self, database: AccessDatabase) -> None:
        self._database = database

    def every(self, tenant: str | None = None, *, ended: bool = False) -> list[KeyView]:
        """The keys of all tenants or of one, declared ones first; revoked and expired ones if ``ended``."""
        now, declared = self._database.now(), self._database.declared.tenants
        with self._database.reading() as connection:
            records = every_key(connection, tenant=tenant, valid_at=None if ended else now)
            living = {each.tenant.name for each in every_tenant(connection) if not each.blocked}
        views = _declared(each for each in declared.values() if tenant in (None, each.name))
        return views + [_view(record, living | declared.keys(), now) for record in records]

    def one(self, key_id: str) -> KeyView:
        """The key with this id; raises :class:`policy.errors.AccessUnknown`."""
        declared = self._database.declared.tenants
        if key_id.startswith(DECLARED):
            found = [view for view in _declared(declared.values()) if view.id == key_id]
            if not found:
                raise _unknown(key_id)
            return found[0]
        with self._database.reading() as connection:
            record = find_key(connection, key_id)
            if record is None:
                raise _unknown(key_id)
            owner = find_tenant(connection, record.tenant)
        lives = record.tenant in declared or (owner is not None and not owner.blocked)
        return _view(record, (record.tenant,) if lives else (), self._database.now())

    def create(self, wanted: CreateKey, actor: AuditActor) -> CreatedKey[KeyView]:
        """Make a key; the answer is the only one that has it."""
        check_text("alias", wanted.alias)
        check_access("", wanted, self._database.declared.models)
        with self._database.changing(actor) as change:
            known = self._database.declared.tenants
            owner = find_tenant(change.connection, wanted.tenant)
            if wanted.tenant not in known and owner is None:
                raise AccessUnknown(f"there is no tenant {wanted.tenant!r}: create it, or declare it")
            expires = expiry(wanted.expires, wanted.duration, change.now)
            key = new_key()
            record = KeyRecord(
                id=new_id("key"), sha256=digest_of(key.encode()), tenant=wanted.tenant, alias=wanted.alias,
                access=access_of(wanted), created=change.now, expires=expires,
            )  # fmt: skip
            self._insert(change.connection, record)
            change.record("key.create", record.id, after=_audited(record))
            blocked = owner is not None and owner.blocked and wanted.tenant not in known
            view = _view(record, () if blocked else (wanted.tenant,), change.now)
        return CreatedKey(key=key, view=view)

    def rotate(self, key_id: str, grace_s: float, actor: AuditActor) -> CreatedKey[KeyView]:
        """Replace a key by a new one with the same settings; the old one ends after ``grace_s``.

        What either uses of the limits, both have used.
        """
        require(0 <= grace_s <= _MAX_GRACE_S, "grace_s", grace_s, f"0 to {_MAX_GRACE_S:g} seconds")
        with self._database.changing(actor) as change:
            old = self._valid(change.connection, key_id, change.now)
            key = new_key()
            new = structs.replace(
                old, id=new_id("key"), sha256=digest_of(key.encode()), created=change.now,
                first_id=old.first_id or old.id,
            )  # fmt: skip
            if grace_s:
                ends = change.now + grace_s
                old = structs.replace(old, expires=ends if old.expires is None else min(ends, old.expires))
            else:
                old = structs.replace(old, revoked=change.now)
            end_key(change.connection, old)
            self._insert(change.connection, new)
            after = {"id": new.id, "old_key_ends": old.revoked or old.expires}
            change.record("key.rotate", key_id, before=_audited(old), after=after)
            view = _view(new, (new.tenant,), change.now)
        return CreatedKey(key=key, view=view)

    def revoke(self, key_id: str, actor: AuditActor) -> KeyView:
        """Refuse a key from now on."""
        with self._database.changing(actor) as change:
            record = self._valid(change.connection, key_id, change.now)
            revoked = end_key(change.connection, structs.replace(record, revoked=change.now))
            change.record("key.revoke", key_id, before=_audited(record))
            return _view(revoked, (record.tenant,), change.now)

    def _insert(self, connection: Any, record: KeyRecord) -> None:
        if count_valid(connection, KeyRecord, record.created) >= MAX_KEYS:
            raise AccessRefused(f"there are {MAX_KEYS} valid keys already, the most that workers keep")
        insert_key(connection, record)

    def _valid(self, connection: Any, key_id: str, now: float) -> KeyRecord:
        if key_id.startswith(DECLARED):
            raise AccessRefused(f"{key_id} is declared: change it in the deployment file")
        record = find_key(connection, key_id)
        if record is None:
            raise _unknown(key_id)
        if (state := state_of(record, now)) != "valid":
            raise AccessRefused(f"{key_id} is {state} already")
        return record


class AdminKeyChanges:
    """What the routes of admin keys do."""

    def __init__(self, database: AccessDatabase) -> None:
        self._database = database

    def every(self, *, ended: bool = False) -> list[AdminKeyView]:
        """The admin keys, oldest first; revoked and expired ones if ``ended``."""
        now = self._database.now()
        with self._database.reading() as connection:
            records = every_admin_key(connection, valid_at=None if ended else now)
        return [_admin_view(record, now) for record in records]

    def create(self, wanted: CreateAdminKey, actor: AuditActor) -> CreatedKey[AdminKeyView]:
        """Make an admin key; the answer is the only one that has it."""
        check_name("name", wanted.name)
        with self._database.changing(actor) as change:
            valid = every_admin_key(change.connection, valid_at=change.now)
            if any(each.name == wanted.name for each in valid):
                raise AccessRefused(f"there is an admin key {wanted.name!r} already")
            if len(valid) >= MAX_ADMIN_KEYS:
                raise AccessRefused(f"there are {MAX_ADMIN_KEYS} admin keys already")
            key = new_key(ADMIN_PREFIX)
            record = AdminKeyRecord(
                id=new_id("admin"), sha256=digest_of(key.encode()), name=wanted.name, role=wanted.role,
                created=change.now, expires=expiry(wanted.expires, wanted.duration, change.now),
            )  # fmt: skip
            insert_admin_key(change.connection, record)
            view = _admin_view(record, change.now)
            change.record("admin_key.create", wanted.name, after=view)
        return CreatedKey(key=key, view=view)

    def revoke(self, name: str, actor: AuditActor) -> AdminKeyView:
        """Refuse an admin key, by its name or id, from now on."""
        with self._database.changing(actor) as change:
            record = find_admin_key(change.connection, name)
            if record is None:
                raise AccessUnknown(f"there is no admin key {name!r}")
            if (state := state_of(record, change.now)) != "valid":
                raise AccessRefused(f"the admin key {name!r} is {state} already")
            before = _admin_view(record, change.now)
            revoked = end_key(change.connection, structs.replace(record, revoked=change.now))
            change.record("admin_key.revoke", record.name, before=before)
        return _admin_view(revoked, change.now)


def _unknown(key_id: str) -> AccessUnknown:
    return AccessUnknown(f"there is no key {key_id!r}")


def _view(record: KeyRecord, living: Collection[str], now: float) -> KeyView:
    state = state_of(record, now)
    return KeyView(
        **structs.asdict(record.access),
        id=record.id,
        tenant=record.tenant,
        state="blocked" if state == "valid" and record.tenant not in living else state,
        alias=record.alias,
        created=record.created,
        expires=record.expires,
        revoked=record.revoked,
    )


def _declared(tenants: Iterable[Tenant]) -> list[KeyView]:
    """The keys that the deployment file declares."""
    return [
        KeyView(id=f"{DECLARED}{digest[:_DIGITS]}", tenant=each.name, state="valid", declared=True)
        for each in tenants
        for digest in each.keys_sha256
    ]


def _audited(record: KeyRecord) -> dict[str, Any]:
    """A key for the audit trail: neither itself nor its digest."""
    none = structs.asdict(AccessPolicy())
    changed = {name: value for name, value in structs.asdict(record.access).items() if value != none[name]}
    return {"tenant": record.tenant, "alias": record.alias, "expires": record.expires, **changed}


def _admin_view(record: AdminKeyRecord, now: float) -> AdminKeyView:
    return AdminKeyView(
        id=record.id,
        name=record.name,
        role=record.role,
        state=state_of(record, now),
        created=record.created,
        expires=record.expires,
        revoked=record.revoked,
    )
