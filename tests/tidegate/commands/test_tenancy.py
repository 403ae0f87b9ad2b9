"""``tenants``, ``keys``, ``admin-keys`` and ``audit`` on a state directory where nothing runs."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from policy.deployment_file.parse import parse
from policy.errors import AccessRefused, AccessUnknown, ConfigError
from store.database import Database
from store.key_derivation import digest_of
from store.state_dir import StateDir
from store.tenancy import ledger
from store.tenancy.ledger import LedgerKey, UsageTotals
from tests.policy.example_documents import GOOD
from tidegate.cli import group


class Shell:
    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, *words: str) -> str:
        arguments = ["--state-dir", str(self.root), *words]
        result = CliRunner().invoke(group, arguments, catch_exceptions=False, standalone_mode=False)
        return result.output

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def tidegate(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "state")


def test_a_tenant_and_its_keys(tidegate: Shell) -> None:
    out = tidegate("tenants", "create", "web", "--rpm-limit", "60", "--feature", "tools", "--weight", "3")
    assert "limits: rpm_limit=60 features=tools" in out and "tidegate keys create web" in out
    made = tidegate.json(
        "keys", "create", "web", "--alias", "ci", "--expires", "2999-01-01", "--max-tokens", "9"
    )
    key_id = made["view"]["id"]
    assert (made["view"]["expires"], made["view"]["max_tokens"]) == (32472144000.0, 9)
    (row,) = [line for line in tidegate("keys", "list").splitlines() if key_id in line]
    assert row.split()[1:4] == ["web", "ci", "valid"] and row.endswith("max_tokens=9")
    assert "tpm_limit=5" in tidegate(
        "tenants", "update", "web", "--unset", "rpm_limit", "--tpm-limit", "5", "--block"
    )
    assert "state: blocked" in tidegate("keys", "show", key_id)
    new = tidegate.json("keys", "rotate", key_id, "--grace", "1h")["view"]
    assert tidegate.json("keys", "revoke", key_id)["state"] == "revoked"
    assert [key["id"] for key in tidegate.json("keys", "list")["keys"]] == [new["id"]]
    assert "1 of its keys are revoked" in tidegate("tenants", "delete", "web")
    assert tidegate.json("tenants", "list") == {"tenants": []}
    assert made["key"] not in tidegate("keys", "list", "--all") + tidegate("audit", "--json")

    entries = tidegate.json("audit", "--action", "tenant.")["entries"]
    assert [entry["action"] for entry in entries] == ["tenant.delete", "tenant.update", "tenant.create"]
    assert entries[0]["actor"].startswith("user ")
    assert "rpm_limit: 60 -> null, tpm_limit: null -> 5" in tidegate("audit", "--action", "tenant.update")


def test_the_audit_trail_is_shown_from_the_beginning_of_a_minute(tidegate: Shell) -> None:
    tidegate("tenants", "create", "web")
    (entry,) = tidegate.json("audit")["entries"]
    minute = datetime.fromtimestamp(entry["at"]).strftime("%Y-%m-%dT%H:%M")
    assert tidegate.json("audit", "--since", minute)["entries"] == [entry]
    with pytest.raises(click.BadParameter, match="invalid time 'noon'"):
        tidegate("audit", "--since", "noon")


def test_admin_keys(tidegate: Shell) -> None:
    assert "\n\n  tga-" in tidegate("admin-keys", "create", "bot", "--role", "operator", "--expires", "30d")
    assert "operator" in tidegate("admin-keys", "list")
    assert "is revoked" in tidegate("admin-keys", "revoke", "bot")
    assert tidegate.json("admin-keys", "list") == {"admin_keys": []}


def test_what_is_declared_is_marked_and_is_changed_in_the_file(tidegate: Shell) -> None:
    state = StateDir(tidegate.root)
    state.save(state.deployment_path, GOOD | {"tenants": [{"name": "acme", "keys_sha256": ["ab" * 32]}]})
    (tenant,) = tidegate.json("tenants", "list")["tenants"]
    (key,) = tidegate.json("keys", "list", "--tenant", "acme")["keys"]
    assert tenant["declared"] and (key["declared"], key["id"]) == (True, "declared-abababababab")
    assert "declared" in tidegate("tenants", "list") and "valid, declared" in tidegate("keys", "list")
    tidegate("keys", "create", "acme")
    for words in (("tenants", "delete", "acme"), ("keys", "revoke", key["id"])):
        with pytest.raises(AccessRefused, match="change it in the deployment file"):
            tidegate(*words)


def test_what_is_refused_names_its_field(tidegate: Shell) -> None:
    with pytest.raises(AccessUnknown, match="no tenant 'nobody'"):
        tidegate("keys", "create", "nobody")
    with pytest.raises(ConfigError, match="name: got 'a b', expected a name that matches"):
        tidegate("tenants", "create", "a b")
    with pytest.raises(ConfigError, match="dry_run"):
        tidegate("tenants", "create", "web", "--dry-run", "rpm_limit")


def test_the_snippet_is_a_tenant_with_the_digest_of_the_key(tidegate: Shell) -> None:
    out = tidegate("keys", "new", "acme")
    key = out.split()[7]
    snippet = yaml.safe_load(out[out.index("tenants:") :])
    (tenant,) = parse({**GOOD, **snippet}).tenants
    assert (tenant.name, tenant.keys_sha256) == ("acme", (digest_of(key.encode()),))
    assert out.count(key) == 1
    document = tidegate.json("keys", "new", "acme")
    assert (document["sha256"], document["name"]) == (digest_of(document["key"].encode()), "acme")
    with pytest.raises(ConfigError, match="a name that matches"):
        tidegate("keys", "new", "a b")


def test_usage_is_summed_and_priced(tidegate: Shell) -> None:
    state = StateDir(tidegate.root).ensure()
    database = Database(state.database_url(""))
    sums: dict[LedgerKey, UsageTotals] = {}
    for day, tenant, model, nano in (
        ("30", "web", "m", 1),
        ("31", "web", "m", 2_500_000_000),
        ("31", "", "n", 0),
    ):
        counts = sums[LedgerKey(f"2026-01-{day}", tenant, "k", model, "")] = UsageTotals()
        counts.requests, counts.prompt_tokens, counts.output_tokens, counts.cost_nano = 3, 2000, 20, nano
    with database.writing() as connection:
        ledger.add(connection, sums)
    database.close()
    found = tidegate.json("usage", "--by", "tenant,model")
    assert [(row["tenant"], row["model"], row["cost"]) for row in found["usage"]] == [
        ("", "n", 0), ("web", "m", 2.500000001)
    ]  # fmt: skip
    assert (found["total"]["requests"], found["total"]["cost"]) == (9, 2.500000001)
    lines = tidegate("usage", "--by", "day", "--tenant", "web", "--since", "2026-01-31", "--csv").splitlines()
    assert lines[0] == "day,requests,prompt_tokens,cached_tokens,output_tokens,estimated,interrupted,cost"
    assert lines[1:] == ["2026-01-31,3,2000,0,20,0,0,2.5"]
    table = tidegate("usage").splitlines()
    assert [line.split() for line in table[-2:]] == [
        ["web", "6", "4,000", "0", "40", "0", "0", "2.5000"],
        ["total", "9", "6,000", "0", "60", "0", "0", "2.5000"],
    ]
    assert tidegate.json("usage", "--until", "2026-01-01")["usage"] == []
