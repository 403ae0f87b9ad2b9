"""``keys``."""

from __future__ import annotations

import click
import msgspec

from policy.config.deployment import ENTRY_NAME
from policy.errors import ConfigError
from store.api_keys import digest_of, new_key


@click.group(help="Make API keys for tenants.")
def keys() -> None:
    """The group; what a key opens is written in the deployment document."""


@keys.command(help="Print a fresh key for tenant NAME, once, and what the document says of it.")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def new(name: str, as_json: bool) -> None:
    if not ENTRY_NAME.fullmatch(name):
        raise ConfigError("NAME", name, f"a name that matches {ENTRY_NAME.pattern}")
    key = new_key()
    digest = digest_of(key.encode())
    if as_json:
        click.echo(msgspec.json.encode({"name": name, "key": key, "sha256": digest}).decode())
        return
    click.echo(f"The key of {name}, shown this once:\n\n  {key}\n")
    click.echo("What the deployment document says of it (then `tidegate apply FILE`):\n")
    click.echo(f"tenants:\n  - name: {name}\n    keys_sha256:\n      - {digest}")
