"""``tenants``: tenants of the database, beside those that the deployment file declares."""

from __future__ import annotations

from typing import Any

import click

from gateway.accounting.cli_client import AccountingClient
from policy.types import Priority
from policy.wire.accounting_api import TENANTS, TenantView, item_path
from store.state_dir import StateDir
from tidegate.commands.options import Decorator, as_json
from tidegate.commands.tenancy.limit_options import access_options, limits_of
from tidegate.commands.terminal import print_change, print_facts, print_list

_name = click.argument("name")


def _settings(command: Any) -> Any:
    """Options of what a tenant has beside its limits; the command gets ``settings``."""
    options: list[Decorator] = [
        click.option("--weight", type=click.FloatRange(0, min_open=True), help="Fair-share weight."),
        click.option(
            "--priority",
            type=click.Choice([priority.value for priority in Priority]),
            help="Of its requests.",
        ),
        click.option("--admin/--no-admin", default=None, help="Whether it may see why requests are routed."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(help="Create, list, change and delete tenants.")
def tenants() -> None:
    """The group; keys have commands of their own."""


@tenants.command(help="Create the tenant NAME; `tidegate keys create NAME` makes its keys.")
@_name
@_settings
@access_options
@as_json
@click.pass_obj
def create(state: StateDir, /, name: str, access: dict[str, Any], as_json: bool, **settings: Any) -> None:
    body = {"name": name, **access, **_given(settings)}
    view = AccountingClient(state).ask("POST", TENANTS, body, answer=TenantView)
    _show(view, as_json)
    if not as_json:
        click.echo(f"Make a key: tidegate keys create {name}")


@tenants.command("list", help="List all tenants, with their limits and the number of their valid keys.")
@as_json
@click.pass_obj
def list_tenants(state: StateDir, as_json: bool) -> None:
    found = AccountingClient(state).ask("GET", TENANTS, answer=list[TenantView])
    columns = (
        ("name", lambda tenant: tenant.name),
        ("state", _state),
        (">keys", lambda tenant: tenant.keys),
        (">weight", lambda tenant: f"{tenant.weight:g}"),
        ("priority", lambda tenant: tenant.priority),
        ("limits", limits_of),
    )
    print_list("tenants", found, columns, as_json=as_json)


@tenants.command(help="Show one tenant.")
@_name
@as_json
@click.pass_obj
def show(state: StateDir, name: str, as_json: bool) -> None:
    _show(AccountingClient(state).ask("GET", item_path(TENANTS, name), answer=TenantView), as_json)


@tenants.command(help="Change what is given of the tenant NAME; the rest stays.")
@_name
@_settings
@access_options
@click.option("--block/--unblock", "blocked", default=None, help="Refuse all its keys, or no more.")
@click.option(
    "--unset", multiple=True, metavar="FIELD", help="Remove a limit, such as rpm_limit, repeatable."
)
@as_json
@click.pass_obj
def update(  # noqa: PLR0917 - click passes them by name
    state: StateDir,
    /,
    name: str,
    access: dict[str, Any],
    blocked: bool | None,
    unset: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    body = {**dict.fromkeys(unset), **access, **_given(settings), **_given({"blocked": blocked})}
    _show(AccountingClient(state).ask("PATCH", item_path(TENANTS, name), body, answer=TenantView), as_json)


@tenants.command(help="Delete the tenant NAME, and revoke its keys.")
@_name
@as_json
@click.pass_obj
def delete(state: StateDir, name: str, as_json: bool) -> None:
    view = AccountingClient(state).ask("DELETE", item_path(TENANTS, name), answer=TenantView)
    sentence = f"The tenant {view.name} is deleted; {view.keys} of its keys are revoked."
    print_change(view, sentence, as_json=as_json)


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _state(tenant: TenantView) -> str:
    return "declared" if tenant.declared else "blocked" if tenant.blocked else "active"


def _show(tenant: TenantView, as_json: bool) -> None:
    facts = {
        "state": _state(tenant),
        "keys": tenant.keys,
        "weight": f"{tenant.weight:g}",
        "priority": tenant.priority,
        "limits": limits_of(tenant),
    }
    print_facts(tenant.name, tenant, facts, as_json=as_json)
