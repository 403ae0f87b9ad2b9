"""``tidegate check``: the policy, bounds and SLO of each model, and custom policies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from policy.errors import ConfigError
from tests.gateway.certificate import certify
from tidegate.cli import group
from tidegate.deployment_file import load
from tidegate.supervisor.children import ROOT

DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))
GOOD = """
class Mine:
    def __init__(self, size=1):
        if size < 1:
            raise ValueError("size must be 1 or more")

    def decide(self, view, memory):
        return view.hold(memory, "as it is")
"""


def check(path: Path, *options: str) -> Result:
    return CliRunner().invoke(group, ["check", str(path), *options])


def write(folder: Path, **control: Any) -> Path:
    model = {
        "name": "m", "engine": "sim",
        "shapes": {"small": {"gpus": 1}, "large": {"gpus": 4, "tensor_parallel": 4}},
        "modes": {
            "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 4}},
            "single-large": {"shape": "large"},
        },
        "control": control,
    }  # fmt: skip
    path = folder / "deployment.yaml"
    path.write_text(json.dumps({"models": [model]}))
    return path


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_every_shipped_deployment_is_valid(path: Path) -> None:
    done = check(path)
    assert done.exit_code == 0, done.output
    *models, last = done.output.splitlines()
    assert last == f"{path} is valid."
    for line, spec in zip(models, load(path).deployment.models, strict=True):
        assert line.startswith(f"{spec.name}: engine {spec.engine}")
        assert ("not scaled" in line) == (not spec.modes)


BOUNDS = "multi-replica x 1 to 4 or single-large x 1"


@pytest.mark.parametrize(
    ("control", "scaling"),
    [
        ({}, f"scaled by predictive: {BOUNDS}"),
        ({"policy": "static"}, f"scaled by static: {BOUNDS}"),
        ({"policy": {"target_tracking": {"metric": "queue"}}}, f"scaled by target_tracking: {BOUNDS}"),
        ({"shadow": "panic_window"}, f"scaled by predictive: {BOUNDS}; shadow policy panic_window"),
        (
            {"guard": {"dry_run": True}},
            f"scaled by predictive: {BOUNDS} (guard.dry_run: decisions are only logged)",
        ),
        (
            {"slo": {"ttft_p95_s": 1, "itl_p95_s": 0.05}},
            f"scaled by predictive: {BOUNDS}; SLO: TTFT p95 1.00 s, ITL p95 50 ms",
        ),
    ],
)
def test_a_line_has_policy_bounds_and_slo(tmp_path: Path, control: dict[str, Any], scaling: str) -> None:
    line, _ = check(write(tmp_path, **control)).output.splitlines()
    assert line == f"m: engine sim, starts in multi-replica; {scaling}"
    (model,) = json.loads(check(write(tmp_path, **control), "--json").output)["models"]
    assert model["decides"] == scaling


def test_a_dry_run_does_not_wake_a_model(tmp_path: Path) -> None:
    path = write(tmp_path, guard={"dry_run": True})
    path.write_text(path.read_text().replace('"min": 1', '"min": 0'))
    line, _ = check(path).output.splitlines()
    assert "(guard.dry_run: decisions are only logged; no wake from zero)" in line


@pytest.mark.parametrize("where", ["mine:Mine", "mine.py:Mine"])
@pytest.mark.parametrize("key", ["policy", "shadow"])
def test_a_custom_policy_beside_the_file_is_found(tmp_path: Path, key: str, where: str) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    path = write(tmp_path, **{key: {"custom": {"class": where, "size": 2}}})
    done = check(path)
    assert done.exit_code == 0, done.output
    assert f"{tmp_path / 'mine.py'}:Mine" in done.output
    # The controller runs in another folder.
    chosen = load(path).raw["models"][0]["control"][key]["custom"]
    assert chosen == {"class": f"{tmp_path / 'mine.py'}:Mine", "size": 2}


@pytest.mark.parametrize(
    ("text", "custom", "why"),
    [
        (GOOD, "mine:Missing", "a class 'Missing'"),
        (GOOD, "elsewhere:Mine", "can be imported"),
        ("class Mine: pass", "mine:Mine", "a method decide"),
        ("1 / 0", "mine:Mine", "ZeroDivisionError"),
        (GOOD, {"class": "mine:Mine", "size": 0}, "size must be 1 or more"),
        (GOOD, {"class": "mine:Mine", "colour": "red"}, "colour"),
    ],
    ids=["no such class", "no such module", "no decide", "does not import", "bad value", "no such parameter"],
)
def test_an_invalid_custom_policy_is_refused(tmp_path: Path, text: str, custom: object, why: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    path = write(tmp_path, policy={"custom": custom})
    done = check(path)
    assert isinstance(done.exception, ConfigError)
    assert done.exception.path.endswith("control.policy")
    assert why in str(done.exception)
    answer = check(path, "--json")
    assert answer.exit_code == 3
    assert json.loads(answer.output)["path"] == done.exception.path


@pytest.mark.parametrize(
    ("decision", "why"),
    [
        ("view.signals.demand.queued", "'NoneType' object has no attribute 'queued' (mine.py:8)"),
        ("view.signals.demand and view.at['now'] or view.hold(None, '')", "it raised TypeError: "),
        ("exit(3)", "it raised RuntimeError: SystemExit: 3"),
        ("view.count + 1", "it answered 2, which is no Proposal"),
        ("view.hold(memory['n'] if memory else {'n': object}, '')", "a memory that JSON cannot express"),
    ],
    ids=["nothing measured", "under load", "exits", "no proposal", "memory"],
)
def test_a_custom_policy_decides_on_sample_views(tmp_path: Path, decision: str, why: str) -> None:
    (tmp_path / "mine.py").write_text(GOOD.replace('view.hold(memory, "as it is")', decision))
    path = write(tmp_path, shadow={"custom": "mine:Mine"})
    for command in ("check", "apply"):
        done = CliRunner().invoke(group, ["--state-dir", str(tmp_path), command, str(path)])
        assert isinstance(done.exception, ConfigError)
        assert (done.exception.path, why in str(done.exception)) == ("models[m].control.shadow", True)


def shown_policies() -> list[tuple[str, str]]:
    page = (ROOT / "docs" / "extending.md").read_text()
    code = page[page.index("## How do I write a scaling policy?") :].split("```python\n")[1].split("```")[0]
    return [(code, "half_full:HalfFull"), ((ROOT / "docs/examples/custom_policy.py").read_text(), EXAMPLE)]


EXAMPLE = "custom_policy:ByTheClock"


@pytest.mark.parametrize(("code", "where"), shown_policies(), ids=lambda value: value[-20:])
def test_policies_in_the_documentation_are_valid(tmp_path: Path, code: str, where: str) -> None:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("scaling.md", "extending.md"))
    (written,) = set(re.findall(rf'policy: (\{{custom: \{{class: "{where}".*?\}}\}})', pages))
    module, _, name = where.partition(":")
    (tmp_path / f"{module}.py").write_text(code)
    done = check(write(tmp_path, policy=yaml.safe_load(written)))
    assert done.exit_code == 0, done.output
    assert "scaled by " in done.output
    assert f"{name}: " in done.output


@pytest.mark.parametrize(
    ("gateway", "tenants", "said"),
    [
        ({"host": "0.0.0.0"}, 0, "gateway.host: got '0.0.0.0', expected 127.0.0.1"),
        (
            {"host": "0.0.0.0", "allow_unauthenticated": True},
            0,
            "other machines may use the API without a key",
        ),
        ({"host": "0.0.0.0"}, 1, " is valid."),
        ({"host": "::1"}, 0, " is valid."),
        ({"tls": {"cert_file": "none", "key_file": "none"}}, 0, "gateway.tls.cert_file: got 'none'"),
        ({"trusted_proxies": ["10.0.0.0/8", "proxy"]}, 0, "gateway.trusted_proxies[1]: got 'proxy'"),
    ],
)
def test_who_may_reach_the_api_is_checked(
    tmp_path: Path, gateway: dict[str, Any], tenants: int, said: str
) -> None:
    path = write(tmp_path)
    keys = [{"name": "t", "keys_sha256": ["a" * 64]}][:tenants]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gateway": gateway, "tenants": keys}))
    done = check(path)
    assert said in f"{done.output}{done.exception}"
    assert (done.exit_code == 0) is (" got " not in said)


@pytest.mark.parametrize("section", ["endpoint_picker", "external_scaler"])
def test_the_certificates_of_grpc_ports_are_checked(tmp_path: Path, section: str) -> None:
    path = write(tmp_path)
    for name in ("mine", "other"):
        certify(tmp_path / f"{name}.pem")
    for key, good in (("mine", True), ("other", False)):
        tls = {"cert_file": "mine.pem", "key_file": f"{key}.key"}
        path.write_text(json.dumps(json.loads(path.read_text()) | {section: tls}))
        done = check(path)
        assert (done.exit_code == 0) is good
        assert (f"{section}.key_file: got '" in f"{done.output}{done.exception}") is not good
