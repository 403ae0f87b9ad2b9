"""``tidegate adapters`` with a deployment of simulated engines, and its usage errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

from policy.errors import ConfigError
from policy.wire.adapter_catalog import Alias, CatalogVersion
from policy.wire.controller import AddAdapterLine, AddAdapterRequest
from serve.adapters.status import AdaptersStatus, AdapterState, AdapterStatus, RefusedBy, VersionStatus
from serve.controller.client import ControllerClient
from tests.store.adapters.making import files, write
from tests.tidegate.conftest import Site, until
from tidegate.cli import group
from tidegate.commands.fleet import adapters as module

DIGEST = {1: "a" * 64, 2: "b" * 64}


def version(number: int, share: float, **over: Any) -> VersionStatus:
    fields: dict[str, Any] = {
        "number": number, "digest": DIGEST[number], "served": f"sql@{DIGEST[number][:12]}", "rank": 8,
        "size": 1_500_000, "source": "/adapters/sql", "at": 900.0, "share": share,
    }  # fmt: skip
    return VersionStatus(**fields | over)


def adapter(model: str = "m", name: str = "sql", **over: Any) -> AdapterStatus:
    fields: dict[str, Any] = {
        "model": model, "name": name, "state": AdapterState.READY, "revision": 1, "split": ((1, 1.0),),
        "versions": (version(1, 1.0),),
    }  # fmt: skip
    return AdapterStatus(**fields | over)


def alias(*split: tuple[int, float]) -> Alias:
    versions = tuple(
        CatalogVersion(number=number, digest=digest, rank=8, size=10, source="/a", at=0.0)
        for number, digest in DIGEST.items()
    )
    return Alias(model="m", name="sql", revision=2, versions=versions, split=split)


def add_adapter(wanted: AddAdapterRequest, progress: Callable[[AddAdapterLine], None]) -> Alias:
    if wanted.tenants and "nobody" in wanted.tenants:
        raise ConfigError("tenants", "nobody", "one of the document's tenants: acme")
    for done in (10, 90):
        progress(AddAdapterLine(step="fetch", message="copying it", done=done, total=100))
    progress(AddAdapterLine(step="check", message="checking its numbers"))
    return alias((2, 1.0))


def controller_of(*adapters: AdapterStatus, models: tuple[str, ...] = ("m",)) -> Mock:
    controller = Mock(ControllerClient)
    controller.adapters.return_value = AdaptersStatus(at=1000.0, models=models, adapters=adapters)
    controller.add_adapter.side_effect = add_adapter
    controller.split_adapter.return_value = alias((1, 95.0), (2, 5.0))
    controller.rollback_adapter.return_value = alias((1, 1.0))
    return controller


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    def invoke(controller: Mock, *words: str) -> Result:
        monkeypatch.setattr(module, "controller_client", lambda state: controller)
        return CliRunner().invoke(group, ["--state-dir", str(tmp_path), "adapters", *words])

    return invoke


def test_the_table_has_a_row_for_each_version_that_is_served(run: Run) -> None:
    split = adapter(
        state=AdapterState.PARTIAL,
        versions=(
            version(1, 0.95, loaded=("r1", "r2", "r3"), requests_per_s=2.5, hit_rate=0.9, last_used=997.0),
            version(2, 0.05),
        ),
    )
    away = adapter(name="law", state=AdapterState.FETCHING, note="no route", versions=(), split=())
    lines = run(controller_of(split, away)).output.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "name version rank size loaded on requests/s hit rate last used state",
        "sql v1@aaaaaaaaaaaa 0.95 8 1.5 MB r1, r2 and 1 more 2.50 90% 3.0 s ago partial",
        "sql v2@bbbbbbbbbbbb 0.05 8 1.5 MB - - - - partial",
        "law - - - no route - - - fetching",
    ]


def test_with_several_base_models_the_table_has_a_model_column(run: Run) -> None:
    shown = run(controller_of(adapter(), adapter("n"), models=("m", "n"))).output.splitlines()
    assert [line.split()[0] for line in shown] == ["model", "m", "n"]
    assert run(controller_of()).output.startswith("There are no adapters.")
    assert run(controller_of(models=())).output.startswith("No model takes adapters")


def test_show_has_sources_and_refusals_of_versions(run: Run) -> None:
    refused = (RefusedBy(replica="r1", reason="base_model: why", at=990.0),)
    why = "more demand than one can carry; 3 requests/s times 0.2 s of a load"
    planned = version(2, 1.0, why=why)
    found = adapter(tenants=("acme",), versions=(version(1, 0.0, refused=refused), planned))
    shown = run(controller_of(found), "show", "sql").output
    assert "acme" in shown
    assert "1 min 40 s ago" in shown
    assert "v1 is refused by r1: base_model: why" in shown
    assert f"placement of v2: {why}" in " ".join(shown.split())
    assert "placement of v1" not in shown
    assert json.loads(run(controller_of(found), "show", "sql", "--json").output)["tenants"] == ["acme"]


def test_a_local_source_becomes_absolute(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    controller = controller_of()
    done = run(controller, "add", "sql", "./sql", "--tenant", "acme", "--tenant", "bits")
    request = AddAdapterRequest(name="sql", source=str(tmp_path / "sql"), tenants=("acme", "bits"))
    assert controller.add_adapter.call_args.args[0] == request
    assert [line.split()[0] for line in done.output.splitlines()] == ["fetch", "check", "sql"]
    assert done.output.endswith("sql on m serves v2 (bbbbbbbbbbbb).\n")


def test_the_option_all_tenants_gives_access_to_all_tenants(run: Run) -> None:
    controller = controller_of(adapter(tenants=("acme",)))
    assert run(controller, "add", "sql", "hf:a/b", "--all-tenants").exit_code == 0
    assert controller.add_adapter.call_args.args[0] == AddAdapterRequest(
        name="sql", source="hf:a/b", tenants=()
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("add", "../sql", "/tmp"), "NAME: got '../sql', expected a name that matches"),
        (("add", "sql", "/not/there"), "SOURCE: got '/not/there', expected a path that exists, https://"),
        (
            ("add", "sql", "hf:a/b", "--tenant", "nobody"),
            "--tenant: got 'nobody', expected one of the document",
        ),
        (("add", "sql", "hf:a/b", "--tenant", "acme", "--all-tenants"), "--all-tenants: expected without"),
        (("add", "sql", "hf:a/b", "--model", "x"), "--model: got 'x', expected m"),
        (("add", "sql", ""), "SOURCE: got '', expected a path that exists"),
        (("split", "sql", "v1"), "VERSION=WEIGHT: got 'v1', expected VERSION=WEIGHT such as v1=95"),
        (("split", "sql", "v1=1", "v1=2"), "got 'v1=2', expected VERSION=WEIGHT"),
        (("split", "sql", "v1=0"), "got 'v1=0', expected a weight above 0"),
        (("add", "sql", "hf:a/b", "--weight", "101"), "101.0 is not in the range 0<=x<=100"),
        (("rollback", "sql", "--to", "1"), "--to: got '1', expected a version such as v1"),
        (("remove", "sql", "--model", "x"), "--model: got 'x', expected m"),
        (("--json", "remove", "sql"), "--json: expected after remove"),
    ],
)
def test_invalid_values_are_usage_errors(run: Run, words: tuple[str, ...], says: str) -> None:
    controller = controller_of(adapter())
    done = run(controller, *words)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
    assert {call[0] for call in controller.method_calls} <= {"adapters", "add_adapter"}


def test_an_ambiguous_model_must_be_named(run: Run) -> None:
    controller = controller_of(adapter(), adapter("n"), adapter("n", "law"), models=("m", "n"))
    for words in (("remove", "sql"), ("add", "sql", "hf:a/b"), ("add", "new", "hf:a/b")):
        done = run(controller, *words)
        assert (done.exit_code, "--model: got none, expected one of m, n" in done.output) == (2, True)
    assert run(controller, "remove", "law").output == "law is removed from n.\n"
    assert run(controller, "add", "law", "hf:a/b").exit_code == 0
    assert run(controller, "rollback", "sql", "--model", "n").exit_code == 0
    controller.remove_adapter.assert_called_once_with("n", "law")
    controller.rollback_adapter.assert_called_once_with("n", "sql", None)
    assert controller.add_adapter.call_args.args[0].model == "n"


def test_split_and_rollback_print_the_served_versions(run: Run) -> None:
    controller = controller_of(adapter())
    done = run(controller, "split", "sql", "v1=95", "v2=5")
    assert done.output == "sql on m serves 0.95 of v1 (aaaaaaaaaaaa), 0.05 of v2 (bbbbbbbbbbbb).\n"
    assert run(controller, "rollback", "sql").output == "sql on m serves v1 (aaaaaaaaaaaa).\n"
    controller.split_adapter.assert_called_once_with("m", "sql", {"v1": 95.0, "v2": 5.0})
    controller.rollback_adapter.assert_called_once_with("m", "sql", None)
    assert run(controller, "rollback", "sql", "--to", "v1").exit_code == 0
    assert controller.rollback_adapter.call_args.args == ("m", "sql", "v1")


def test_a_version_without_requests_is_named(run: Run) -> None:
    controller = controller_of(adapter())
    controller.add_adapter.side_effect = lambda request, progress: alias((1, 1.0))
    done = run(controller, "add", "sql", "hf:a/b", "--weight", "0", "--force")
    request = AddAdapterRequest(name="sql", source="hf:a/b", weight=0, force=True)
    assert controller.add_adapter.call_args.args[0] == request
    first, second = done.output.splitlines()
    assert first == "sql on m serves v1 (aaaaaaaaaaaa)."
    assert second == "v2 (bbbbbbbbbbbb) serves no requests: see `tidegate adapters split`."


@pytest.fixture
def sim(site: Site) -> Site:
    document = site.shipped("sim.yaml")
    document["models"][0]["adapters"] = {"sources": [{"name": "law", "path": "law"}]}
    write(site.folder / "law", files(1))
    write(site.folder / "sql", files(2))
    write(site.folder / "sql-2", files(3))
    site.up(document)
    return site


def ask(site: Site, model: str) -> str:
    answer = site.complete(model)
    return str(answer.json()["model"]) if answer.is_success else str(answer.status_code)


def run_json(site: Site, *words: str) -> Any:
    code, out, err = site.tidegate("adapters", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.process
def test_an_adapter_is_added_replaced_split_rolled_back_and_removed(sim: Site) -> None:
    # The adapter of the document is added by the controller.
    until(lambda: ask(sim, "law").startswith("law@"), "the adapter of the document")

    code, out, _ = sim.tidegate("adapters", "add", "sql", os.fspath(sim.folder / "sql"))
    assert (code, "sql on sim serves v1" in out) == (0, True)
    first = until(lambda: (name := ask(sim, "sql")).startswith("sql@") and name, "the first version")
    again = run_json(sim, "add", "sql", os.fspath(sim.folder / "sql-2"))
    second = f"sql@{again['versions'][1]['digest'][:12]}"
    until(lambda: ask(sim, "sql") == second, "the second version")
    assert ask(sim, first) == first

    def used() -> bool:
        (found,) = [each for each in run_json(sim)["adapters"] if each["name"] == "sql"]
        return (
            all(each["loaded"] and each["last_used"] for each in found["versions"])
            and found["state"] == "ready"
        )

    until(used, "the controller hears of it")
    code, out, _ = sim.tidegate("adapters")
    assert code == 0
    assert "ready" in out
    assert "requests/s" in out

    assert run_json(sim, "split", "sql", "v1=1", "v2=1")["split"] == [[1, 1.0], [2, 1.0]]
    assert run_json(sim, "rollback", "sql")["split"] == [[1, 1.0]]
    assert run_json(sim, "rollback", "sql", "--to", "v2")["split"] == [[2, 1.0]]
    code, _, err = sim.tidegate("adapters", "split", "sql", "v9=1")
    assert (code, "v9" in err) == (5, True)
    bad = write(sim.folder / "bad", files(4, use_dora=True))
    code, _, err = sim.tidegate("adapters", "add", "bad", str(bad))
    assert (code, "use_dora" in err) == (5, True)

    # A changed document alone restarts no replica.
    pids = [replica["pid"] for replica in sim.status()["fleet"]["replicas"]]
    document = json.loads(sim.file.read_text())
    document["models"][0]["adapters"]["sources"] = []
    sim.file.write_text(json.dumps(document))
    code, out, _ = sim.tidegate("apply", str(sim.file))
    assert code == 0
    assert "models[sim].adapters.sources[law]" in out
    assert "new revision" not in out
    until(lambda: ask(sim, "law") == "404", "the adapter that left the document")
    assert [replica["pid"] for replica in sim.status()["fleet"]["replicas"]] == pids

    assert run_json(sim, "remove", "sql") == {"model": "sim", "name": "sql"}
    until(lambda: ask(sim, "sql") == "404", "the adapter that was removed")
    code, _, err = sim.tidegate("adapters", "remove", "sql")
    assert (code, "NAME: got 'sql'" in err) == (5, True)


@pytest.mark.long
@pytest.mark.process
def test_a_new_replica_loads_its_adapters_before_the_first_request(sim: Site) -> None:
    names = [f"a{i}" for i in range(4)]
    for i, name in enumerate(names):
        run_json(sim, "add", name, os.fspath(write(sim.folder / name, files(10 + i))))
    for name in names * 5:
        assert ask(sim, name).startswith(f"{name}@")

    def replicas_with(kind: str) -> set[str]:
        versions = [version for each in run_json(sim)["adapters"] for version in each["versions"]]
        return {replica for version in versions for replica in version[kind]}

    (first,) = until(lambda: replicas_with("planned"), "a plan")
    code, _, err = sim.tidegate("scale", "sim", "2", "--wait")
    assert (code, err) == (0, "")
    # One replica has twice its share: some adapters move, and are loaded without requests.
    (second,) = until(lambda: replicas_with("planned") - {first}, "a plan for both")
    until(lambda: second in replicas_with("loaded"), "what was planned is loaded")


@pytest.mark.long
@pytest.mark.process
def test_a_removed_adapter_of_the_deployment_file_returns_at_the_next_start(sim: Site) -> None:
    until(lambda: ask(sim, "law").startswith("law@"), "the adapter of the document")
    run_json(sim, "remove", "law")
    until(lambda: ask(sim, "law") == "404", "the adapter that was removed")

    pid = sim.workers()["controller"]
    os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        code, out, _ = sim.tidegate("adapters", "--json")
        return (code, code == 0 and json.loads(out)["adapters"]) == (0, [])

    until(lambda: sim.workers()["controller"] not in (0, pid) and back(), "another controller")
    # The declaration is processed before a later add.
    run_json(sim, "add", "sql", os.fspath(sim.folder / "sql"))
    assert [each["name"] for each in run_json(sim)["adapters"]] == ["sql"]

    assert sim.tidegate("down")[0] == 0
    sim.up(json.loads(sim.file.read_text()))
    until(lambda: ask(sim, "law").startswith("law@"), "the adapter of the document, again")
