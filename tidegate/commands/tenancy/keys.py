"""``keys`` and ``admin-keys``: API keys of tenants, and keys for the admin port."""

from __future__ import annotations

import time
from typing import Any

import click

from gateway.accounting.cli_client import AccountingClient
from policy.config.tenancy_checks import check_name
from policy.wire.accounting_api import (
    ADMIN_KEYS,
    KEYS,
    AdminKeyView,
    AdminRole,
    CreatedKey,
    KeyView,
    item_path,
)
from policy.wire.controller import with_query
from store.key_derivation import digest_of, new_key
from store.state_dir import StateDir
from tidegate.commands.options import as_json
from tidegate.commands.tenancy.limit_options import access_options, date, expires_option, limits_of, when
from tidegate.commands.terminal import print_change, print_facts, print_json, print_list
from tidegate.commands.units import duration

_ended = click.option("--all", "ended", is_flag=True, help="Also revoked and expired ones.")


def _of_one_key(command: Any) -> Any:
    """The argument and options of a command on one key."""
    return click.argument("key_id", metavar="ID")(as_json(click.pass_obj(command)))


@click.group(help="Create, list, rotate and revoke API keys of tenants.")
def keys() -> None:
    """The group; tenants have commands of their own."""


@keys.command(help="Create a key for TENANT, and print it once.")
@click.argument("tenant")
@click.option("--alias", default="", help="What the key is for, shown in lists.")
@expires_option
@access_options
@as_json
@click.pass_obj
def create(  # noqa: PLR0917 - click passes them by name
    state: StateDir, tenant: str, alias: str, expires: str | None, access: dict[str, Any], as_json: bool
) -> None:
    body = {"tenant": tenant, "alias": alias, **when(expires), **access}
    _show_new(AccountingClient(state).ask("POST", KEYS, body, answer=CreatedKey[KeyView]), as_json)


@keys.command(help="Print a new key for tenant NAME once, with the lines that declare it; nothing is stored.")
@click.argument("name")
@as_json
def new(name: str, as_json: bool) -> None:
    check_name("NAME", name)
    key = new_key()
    digest = digest_of(key.encode())
    if as_json:
        print_json({"name": name, "key": key, "sha256": digest})
        return
    click.echo(f"The key of {name}, shown only now:\n\n  {key}\n")
    click.echo("Add this to the deployment file, then run `tidegate apply FILE`:\n")
    click.echo(f"tenants:\n  - name: {name}\n    keys_sha256:\n      - {digest}")


@keys.command("list", help="List the keys of all tenants, without the keys themselves.")
@click.option("--tenant", help="Only this tenant's.")
@_ended
@as_json
@click.pass_obj
def list_keys(state: StateDir, tenant: str | None, ended: bool, as_json: bool) -> None:
    path = with_query(KEYS, tenant=tenant, all="true" if ended else None)
    found = AccountingClient(state).ask("GET", path, answer=list[KeyView])
    now = time.time()
    columns = (
        ("id", lambda key: key.id),
        ("tenant", lambda key: key.tenant),
        ("alias", lambda key: key.alias or None),
        ("state", _state),
        ("created", lambda key: date(key.created, now)),
        ("expires", lambda key: date(key.expires, now)),
        ("limits", limits_of),
    )
    print_list("keys", found, columns, as_json=as_json)


@keys.command(help="Show one key, without the key itself.")
@_of_one_key
def show(state: StateDir, key_id: str, as_json: bool) -> None:
    _show(AccountingClient(state).ask("GET", item_path(KEYS, key_id), answer=KeyView), as_json)


@keys.command(help="Replace a key by a new one with the same limits, and print that once.")
@click.option("--grace", metavar="DURATION", help="How long the old key stays valid, such as 1d.")
@_of_one_key
def rotate(state: StateDir, key_id: str, grace: str | None, as_json: bool) -> None:
    body = {"grace_s": duration(grace) if grace else 0.0}
    path = item_path(KEYS, key_id, "rotate")
    _show_new(AccountingClient(state).ask("POST", path, body, answer=CreatedKey[KeyView]), as_json)


@keys.command(help="Revoke a key: within a second it is refused on all hosts.")
@_of_one_key
def revoke(state: StateDir, key_id: str, as_json: bool) -> None:
    _show(AccountingClient(state).ask("DELETE", item_path(KEYS, key_id), answer=KeyView), as_json)


@click.group("admin-keys", help="Create, list and revoke keys for the admin port.")
def admin_keys() -> None:
    """The group; the token of the state directory needs no key."""


@admin_keys.command("create", help="Create an admin key called NAME, and print it once.")
@click.argument("name")
@click.option(
    "--role",
    required=True,
    type=click.Choice([role.value for role in AdminRole]),
    help="viewer: read; operator: also scale, mode, adapters; admin: also tenants and keys.",
)
@expires_option
@as_json
@click.pass_obj
def create_admin(state: StateDir, name: str, role: str, expires: str | None, as_json: bool) -> None:
    body = {"name": name, "role": role, **when(expires)}
    made = AccountingClient(state).ask("POST", ADMIN_KEYS, body, answer=CreatedKey[AdminKeyView])
    print_change(made, f"The admin key {name} ({role}), shown only now:\n\n  {made.key}", as_json=as_json)


@admin_keys.command("list", help="List the admin keys, without the keys themselves.")
@_ended
@as_json
@click.pass_obj
def list_admin(state: StateDir, ended: bool, as_json: bool) -> None:
    path = with_query(ADMIN_KEYS, all="true" if ended else None)
    found = AccountingClient(state).ask("GET", path, answer=list[AdminKeyView])
    now = time.time()
    columns = (
        ("name", lambda key: key.name),
        ("id", lambda key: key.id),
        ("role", lambda key: key.role),
        ("state", lambda key: key.state),
        ("created", lambda key: date(key.created, now)),
        ("expires", lambda key: date(key.expires, now)),
    )
    print_list("admin_keys", found, columns, as_json=as_json)


@admin_keys.command("revoke", help="Revoke an admin key, by its name or id.")
@click.argument("name")
@as_json
@click.pass_obj
def revoke_admin(state: StateDir, name: str, as_json: bool) -> None:
    view = AccountingClient(state).ask("DELETE", item_path(ADMIN_KEYS, name), answer=AdminKeyView)
    print_change(view, f"The admin key {view.name} is revoked.", as_json=as_json)


def _show_new(made: CreatedKey[KeyView], as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    click.echo(f"The key {made.view.id} of {made.view.tenant}, shown only now:\n\n  {made.key}")


def _show(view: KeyView, as_json: bool) -> None:
    now = time.time()
    facts = {
        "tenant": view.tenant,
        "alias": view.alias or None,
        "state": _state(view),
        "created": date(view.created, now),
        "expires": date(view.expires, now),
        "revoked": date(view.revoked, now),
        "limits": limits_of(view),
    }
    print_facts(view.id, view, facts, as_json=as_json)


def _state(key: KeyView) -> str:
    return f"{key.state}, declared" if key.declared else key.state
