"""``keys``: API keys of tenants."""

from __future__ import annotations

import click

from policy.config.deployment import ENTRY_NAME
from policy.errors import ConfigError
from store.api_keys import digest_of, new_key
from tidegate.commands.options import as_json
from tidegate.commands.terminal import print_json


@click.group(help="Create API keys for tenants.")
def keys() -> None:
    """The group; the rights of a key are written in the deployment file."""


@keys.command(help="Print a new key for tenant NAME once, with the lines to add to the deployment file.")
@click.argument("name")
@as_json
def new(name: str, as_json: bool) -> None:
    if not ENTRY_NAME.fullmatch(name):
        raise ConfigError("NAME", name, f"a name that matches {ENTRY_NAME.pattern}")
    key = new_key()
    digest = digest_of(key.encode())
    if as_json:
        print_json({"name": name, "key": key, "sha256": digest})
        return
    click.echo(f"The key of {name}, shown only now:\n\n  {key}\n")
    click.echo("Add this to the deployment file, then run `tidegate apply FILE`:\n")
    click.echo(f"tenants:\n  - name: {name}\n    keys_sha256:\n      - {digest}")
