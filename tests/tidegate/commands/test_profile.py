"""``tidegate profile``: which process is sampled, the flame graph, and errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from policy.errors import PreconditionFailed, TargetError, TidegateError, Unreachable
from policy.types import Replica, ReplicaLoad, ReplicaPhase
from tests.tidegate.conftest import Site
from tidegate.cli import group
from tidegate.commands.fleet import process_profiler as command

BUSY = "print(flush=True)\ndef busy():\n while True:\n  sum(range(1000))\nbusy()"


@pytest.fixture
def engine() -> Iterator[int]:
    """A process with the command line of an engine, and of a controller, which computes."""
    names = ["serve.engine.main", "serve.controller.process"]
    with subprocess.Popen([sys.executable, "-c", BUSY, *names], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # while it is executed it has no command line
        yield process.pid
        process.kill()


Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command with these replicas, by their engine's pid, and gateway workers."""

    def invoke(*words: str, replicas: dict[str, int] | None = None, controller: int = 0) -> Any:
        fleet = SimpleNamespace(
            replicas=tuple(
                Replica(id=name, model="m", shape="s", generation=1, state=ReplicaPhase.READY,
                        load=ReplicaLoad(at=0.0), pid=pid, node="n2")
                for name, pid in (replicas or {}).items()
            )
        )  # fmt: skip
        client = SimpleNamespace(fleet=lambda: fleet, status=lambda: SimpleNamespace(pid=controller))
        monkeypatch.setattr(command, "controller_client", lambda state: client)
        arguments = ["--state-dir", str(tmp_path), "profile", *words, "--out", str(tmp_path / "out.svg")]
        return CliRunner().invoke(group, arguments)

    return invoke


def ran(monkeypatch: pytest.MonkeyPatch, code: int = 0, said: str = "") -> list[list[str]]:
    """Instead of py-spy: notes the command lines, and writes the file if ``code`` is 0."""
    lines: list[list[str]] = []

    def record(line: list[str], **_: Any) -> Any:
        lines.append(line[1:])
        if not code:
            Path(line[line.index("--output") + 1]).write_text("<svg/>")
        return SimpleNamespace(returncode=code, stdout="", stderr=said)

    monkeypatch.setattr(command.subprocess, "run", record)
    return lines


def test_an_engine_is_sampled_with_its_children_and_a_replica_is_its_parent(
    run: Run, engine: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = ran(monkeypatch)
    assert run("engine", "r1", "--seconds", "3", replicas={"r1": engine}).exit_code == 0
    assert run("replica", "--native", "--rate", "50", replicas={"r1": engine}).exit_code == 0
    out = str(tmp_path / "out.svg")
    assert lines == [
        ["record", "--pid", str(engine), "--duration", "3", "--output", out, "--rate", "100",
         "--subprocesses"],
        ["record", "--pid", str(psutil.Process().pid), "--duration", "10", "--output", out, "--rate", "50",
         "--native"],
    ]  # fmt: skip


def test_the_controller_is_sampled(run: Run, engine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ran(monkeypatch)
    assert run("controller", controller=engine).exit_code == 0
    assert lines[0][2] == str(engine)
    elsewhere = run("controller", controller=psutil.Process().pid)
    assert "the controller, pid" in str(elsewhere.exception)
    assert run("controller", "x").exit_code == 2


@pytest.mark.parametrize(
    ("words", "replicas", "message"),
    [
        (["engine"], {}, "no replica has an engine that runs"),
        (["engine"], {"b": 1, "a": 2}, "name one replica; there are a, b"),
        (["engine", "c"], {"a": 2}, "no replica 'c'; there are a"),
        (
            ["engine", "a"],
            {"a": 1},
            "the engine of a, pid 1, is not on this machine (node n2); there run: py-spy",
        ),
    ],
)
def test_a_process_that_is_not_there(
    run: Run, words: list[str], replicas: dict[str, int], message: str
) -> None:
    result = run(*words, replicas=replicas)
    assert isinstance(result.exception, TargetError)
    assert message in str(result.exception)


def test_a_gateway_needs_a_running_deployment(run: Run) -> None:
    assert isinstance(run("gateway").exception, Unreachable)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (
            "Permission Denied: Try running again",
            PreconditionFailed,
            "sudo sysctl kernel.yama.ptrace_scope=0",
        ),
        ("Error: Operation not permitted (os error 1)", PreconditionFailed, "--cap-add SYS_PTRACE"),
        (
            "Error: no symbols\nReason: stripped",
            TidegateError,
            "py-spy failed with status 1: Error: no symbols\nReason: stripped",
        ),
        ("Error: No stack counts found\n 8: main", TidegateError, "computed nothing in 10 s: send requests"),
    ],
)
def test_failures_say_what_to_do(
    run: Run, engine: int, monkeypatch: pytest.MonkeyPatch, *, said: str, error: type[Exception], message: str
) -> None:
    ran(monkeypatch, 1, said)
    result = run("controller", controller=engine)
    assert type(result.exception) is error
    assert message in str(result.exception)


def test_a_process_that_ends_is_named(run: Run, engine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, 1, "Error: No such process")
    found = iter([psutil.Process(engine), None])
    monkeypatch.setattr(command, "find", lambda pid: next(found))
    assert "ended before it was sampled" in str(run("controller", controller=engine).exception)


@pytest.mark.slow
def test_the_flame_graph_shows_what_the_process_does(run: Run, engine: int, tmp_path: Path) -> None:
    result = run("engine", "--seconds", "1", replicas={"r1": engine})
    assert result.exit_code == 0, result.exception
    text = (tmp_path / "out.svg").read_text()
    assert text.startswith("<?xml")
    assert "busy (&lt;string&gt;:4)" in text


@pytest.mark.process
def test_a_gateway_worker_is_found_by_its_number(site: Site, tmp_path: Path) -> None:
    site.up({"models": [{"name": "m", "engine": "external", "urls": [site.upstream]}],
             "gateway": {"port": site.port, "admin_port": site.admin_port, "workers": 1}})  # fmt: skip
    out = tmp_path / "gateway.svg"
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(trust_env=False) as http:
            while not done.is_set():
                http.get(f"http://127.0.0.1:{site.admin_port}/livez")

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        code, _, err = site.tidegate("profile", "gateway", "0", "--seconds", "1", "--out", str(out))
    finally:
        done.set()
        asking.join()
    assert (code, out.exists()) == (0, True), err
    code, _, err = site.tidegate("profile", "gateway", "7")
    assert (code, "no gateway worker '7'; there are 0" in err) == (5, True)
