"""Secrets in a model's environment and key digests are used, but not shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.ports import free_ports
from tests.tidegate.conftest import Site
from tidegate.redaction import redact


def test_only_variables_named_like_secrets_are_masked() -> None:
    model = {"name": "token", "env": {"HF_TOKEN": "hf-1", "API_KEY": "k", "OMP_NUM_THREADS": "1"}}
    shown: Any = redact({"models": [model], "gateway": {"port": 1}})
    assert shown["models"][0] == {
        "name": "token", "env": {"HF_TOKEN": "***", "API_KEY": "***", "OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    assert shown["gateway"] == {"port": 1}
    assert redact(None, "models[m].env.HF_TOKEN") is None


def test_key_digests_are_shortened() -> None:
    tenant = {"name": "acme", "keys_sha256": ["0123456789" * 6 + "abcd"], "weight": 1.0}
    shown: Any = redact({"tenants": [tenant]})
    assert shown["tenants"] == [{"name": "acme", "keys_sha256": ["01234567..."], "weight": 1.0}]
    assert redact(tuple(tenant["keys_sha256"]), "tenants[acme].keys_sha256") == ["01234567..."]  # type: ignore[arg-type]
    assert redact(tenant, "tenants[acme]") == shown["tenants"][0]


def test_passwords_and_signatures_in_urls_are_masked() -> None:
    store, source = "postgresql://user:KEY@h/d", "https://user:KEY@h/a.zip?signature=KEY"
    shown: Any = redact({"store": store, "models": [{"adapters": {"sources": [{"source": source}]}}]})
    assert shown["store"] == "postgresql://***@h/d"
    assert shown["models"][0]["adapters"]["sources"][0]["source"] == "https://h/a.zip"
    assert redact(store, "store") == shown["store"]
    assert redact("postgresql://user:K/E?Y@h/d", "store") == "postgresql://***@h/d"
    asked = "postgresql://h/d?password=KEY&sslmode=require&sslpassword=KEY"
    assert redact(asked, "store") == "postgresql://h/d?password=***&sslmode=require&sslpassword=***"
    assert redact(source, "models[m].adapters.sources[sql].source") == "https://h/a.zip"
    assert redact("sqlite:////var/lib/t.db", "store") == "sqlite:////var/lib/t.db"


@pytest.mark.process
def test_status_shows_no_secret_and_apply_still_sees_one_change(site: Site) -> None:
    document = json.loads(site.file.read_text())
    document["models"].append(
        {
            "name": "s", "engine": "sim", "env": {"HF_TOKEN": "hf-first", "PLAIN": "seen"},
            "shapes": {"small": {"gpus": 1}}, "modes": {"multi-replica": {"shape": "small"}},
        }
    )  # fmt: skip
    document["cluster"] = {"controller": f"127.0.0.1:{free_ports(1)[0]}"}
    site.up(document)
    _, out, _ = site.tidegate("status", "--json")
    assert "hf-first" not in out
    assert json.loads(out)["supervisor"]["document"]["models"][1]["env"] == {
        "HF_TOKEN": "***", "PLAIN": "seen",
    }  # fmt: skip

    document["models"][1]["env"]["HF_TOKEN"] = "hf-second"
    site.file.write_text(json.dumps(document))
    _, out, _ = site.tidegate("apply", str(site.file), "--dry-run", "--json")
    (change,) = json.loads(out)["changes"]
    assert (change["path"], change["before"], change["after"]) == ("models[s].env.HF_TOKEN", "***", "***")
