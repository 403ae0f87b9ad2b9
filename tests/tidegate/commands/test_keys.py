"""``keys new`` prints a key once, and a snippet for the deployment file."""

from __future__ import annotations

import json

import yaml
from click.testing import CliRunner

from policy.deployment_file.parse import parse
from store.api_keys import digest_of
from tests.policy.example_documents import GOOD
from tidegate.cli import group


def run(*words: str) -> str:
    result = CliRunner().invoke(group, ["keys", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_snippet_is_a_tenant_with_the_digest_of_the_key() -> None:
    out = run("new", "acme")
    key = out.split()[7]
    snippet = yaml.safe_load(out[out.index("tenants:") :])
    (tenant,) = parse({**GOOD, **snippet}).tenants
    assert (tenant.name, tenant.keys_sha256) == ("acme", (digest_of(key.encode()),))
    assert out.count(key) == 1


def test_keys_new_prints_json() -> None:
    document = json.loads(run("new", "acme", "--json"))
    assert document["sha256"] == digest_of(document["key"].encode())
    assert document["name"] == "acme"


def test_an_invalid_tenant_name_is_refused() -> None:
    result = CliRunner().invoke(group, ["keys", "new", "a b"])
    assert "a name that matches" in str(result.exception)
    assert "tg-" not in result.output
