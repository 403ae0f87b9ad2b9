"""The shipped document with tenants, from up to a revoked key, through the command line and the port."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from store.key_derivation import own_key, salt_secret
from tests.tidegate.conftest import Site, until

pytestmark = pytest.mark.process
KEYS = ("example-web", "example-nightly", "example-operator")


@pytest.fixture
def tenants(site: Site) -> Site:
    out = site.up(site.shipped("tenants.yaml"))
    assert "Authorization: Bearer KEY-OF-web" in out
    return site


def ask(site: Site, key: str, **headers: str) -> tuple[int, httpx.Headers]:
    answer = site.complete("sim", **({"authorization": f"Bearer {key}"} if key else {}), **headers)
    return answer.status_code, answer.headers


def applied(site: Site) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(site.tidegate("audit", "--action", "apply", "--json")[1])[
        "entries"
    ]
    return entries


def test_keys_are_valid_until_the_deployment_file_revokes_them(tenants: Site) -> None:
    assert [ask(tenants, key)[0] for key in (*KEYS, "guess", "")] == [200, 200, 200, 401, 401]
    explained: dict[str, Any] = json.loads(
        ask(tenants, KEYS[2], **{"x-tidegate-explain": "1"})[1]["x-tidegate-explain"]
    )
    assert explained["tenant"] == "operator"
    assert "x-tidegate-explain" not in ask(tenants, KEYS[0], **{"x-tidegate-explain": "1"})[1]

    code, out, _ = tenants.tidegate("keys", "new", "web", "--json")
    assert code == 0
    made = json.loads(out)
    document = json.loads(tenants.file.read_text())
    document["tenants"][0]["keys_sha256"] = [made["sha256"]]
    tenants.file.write_text(json.dumps(document))
    code, out, _ = tenants.tidegate("apply", str(tenants.file), "--json")
    assert code == 0
    (change,) = json.loads(out)["changes"]
    assert (change["path"], change["effect"]) == ("tenants[web].keys_sha256", "live")
    assert change["after"] == [f"{made['sha256'][:8]}..."]
    (entry,) = until(lambda: applied(tenants), "the change is in the audit trail")
    assert (entry["actor"].partition(" ")[0], entry["target"]) == ("user", "deployment")
    assert entry["after"] == {"tenants[web].keys_sha256": [f"{made['sha256'][:8]}..."]}
    # Two workers share the port: both must have applied it.
    until(lambda: [ask(tenants, KEYS[0])[0] for _ in range(8)] == [401] * 8, "the old key is revoked")
    assert ask(tenants, made["key"])[0] == 200
    assert ask(tenants, KEYS[1])[0] == 200

    _, shown, _ = tenants.tidegate("status", "--json")
    secret = (tenants.state / "secret").read_text().strip()
    logs = "".join(path.read_text() for path in (tenants.state / "logs").rglob("*") if path.is_file())
    hidden = (*KEYS, made["key"], made["sha256"], secret, own_key(secret))
    for text in (*hidden, salt_secret(secret).hex()):
        assert text not in shown + logs
    assert not re.search(r"[0-9a-f]{64}", shown)
