"""The lifecycle of a deployment through the command line: real processes, external servers."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from policy.errors import Unreachable
from store.os_process import find
from store.state_dir import StateDir
from tests.ports import free_ports
from tests.tidegate.conftest import Site, until
from tests.tidegate.supervisor.test_local import document
from tidegate.cli import group
from tidegate.exit_codes import exit_of

process = pytest.mark.process


def get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def supervisor_pid(site: Site) -> int:
    pid: int = site.status()["supervisor"]["pid"]
    return pid


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, upstream: str) -> Iterator[Site]:
    port, admin_port = free_ports(2)
    site = Site(tmp_path_factory.mktemp("running"), port, admin_port, upstream)
    site.write()
    code, out, err = site.tidegate("up", str(site.file))
    assert (code, err) == (0, "")
    assert f"http://127.0.0.1:{site.port}/v1/chat/completions" in out
    assert "What is the capital of France?" in out
    yield site
    site.tidegate("down")
    assert site.pids() == []


@process
def test_status_shows_processes_models_and_replicas(running: Site) -> None:
    status = running.status()
    assert status["supervisor"]["phase"] == "ready"
    assert [entry["name"] for entry in status["supervisor"]["processes"]] == [
        *("gateway-0", "gateway-1", "accounting"),
    ]
    assert [(model["name"], model["phase"]) for model in status["models"]] == [("m", "external")]
    assert [replica["url"] for replica in status["fleet"]["replicas"]] == [running.upstream]
    assert get(running.port, "/v1/models") == 200
    code, table, _ = running.tidegate("status")
    assert (code, "gateway-1" in table) == (0, True)


@process
def test_a_second_start_changes_nothing(running: Site) -> None:
    before = (running.workers(), (running.state / "deployment.json").read_bytes())
    code, out, _ = running.tidegate("up", str(running.file))
    assert (code, f"already running at http://127.0.0.1:{running.port}" in out) == (0, True)
    # The same settings, one of them written out: the same deployment.
    running.write(queue_timeout_s=60)
    assert running.tidegate("up", str(running.file))[0] == 0
    code, _, err = running.tidegate("run", str(running.file))
    assert (code, "already runs" in err) == (6, True)
    running.write(queue_timeout_s=7)
    code, _, err = running.tidegate("up", str(running.file))
    assert (code, "with another deployment file" in err) == (5, True)
    assert f"tidegate apply {running.file}" in err
    running.write()
    assert (running.workers(), (running.state / "deployment.json").read_bytes()) == before


@process
def test_logs_and_refusals_of_a_running_deployment(running: Site) -> None:
    code, out, _ = running.tidegate("logs", "supervisor", "-n", "1000")
    assert (code, "ready" in out) == (0, True)
    assert "gateway-0" in running.tidegate("logs")[1]
    code, _, err = running.tidegate("logs", "nobody")
    assert (code, "gateway-0" in err) == (2, True)
    code, _, err = running.tidegate("scale", "m", "2")
    assert (code, "external" in err) == (5, True)


@process
def test_a_killed_worker_is_restarted_on_the_same_port(running: Site) -> None:
    before = running.workers()
    os.kill(before["gateway-0"], signal.SIGKILL)
    assert get(running.port, "/v1/models") == 200
    until(lambda: running.workers()["gateway-0"] not in (0, before["gateway-0"]), "a new gateway-0")
    restarts = {entry["name"]: entry["restarts"] for entry in running.status()["supervisor"]["processes"]}
    assert restarts == {"gateway-0": 1, "gateway-1": 0, "accounting": 0}
    assert running.workers()["gateway-1"] == before["gateway-1"]
    metrics = running.state / "metrics"
    until(lambda: not list(metrics.glob(f"*_{before['gateway-0']}.*")), "its counts are merged")
    assert (metrics / "counter_ended.db").exists()


@process
def test_apply_is_atomic(running: Site) -> None:
    stored = running.state / "deployment.json"
    before = stored.read_bytes()
    assert running.tidegate("apply", "--dry-run", str(running.file))[1] == "No changes.\n"
    written = stored.stat().st_ino
    # Sent without changes too: the controller retries what failed.
    assert running.tidegate("apply", str(running.file))[1] == "No changes.\n"
    assert stored.stat().st_ino != written

    (other,) = free_ports(1)
    running.write(queue_timeout_s=7, port=other)
    code, out, err = running.tidegate("apply", str(running.file))
    assert (code, "only after down and up" in out) == (5, True)
    assert f"gateway.port: got {other}, expected {running.port}" in err
    assert stored.read_bytes() == before

    running.write(queue_timeout_s=7)
    code, out, _ = running.tidegate("apply", str(running.file), "--dry-run", "--json")
    (change,) = json.loads(out)["changes"]
    assert (change["path"], change["after"], change["effect"]) == ("gateway.queue_timeout_s", 7.0, "live")
    assert stored.read_bytes() == before

    code, out, _ = running.tidegate("apply", str(running.file))
    assert (code, "Applied." in out) == (0, True)
    assert json.loads(stored.read_bytes())["gateway"]["queue_timeout_s"] == 7
    running.write()
    assert running.tidegate("apply", str(running.file))[0] == 0


@process
def test_up_without_a_file_restarts_the_deployment_after_down(site: Site) -> None:
    code, _, err = site.tidegate("up")
    assert (code, "no deployment file was applied" in err) == (2, True)
    site.tidegate("up", str(site.file))
    code, out, _ = site.tidegate("down")
    assert (code, "ended gateway-0" in out) == (0, True)
    assert site.pids() == []
    socket.create_server(("127.0.0.1", site.port)).close()
    assert site.tidegate("down")[:2] == (0, "Nothing is running.\n")
    assert site.tidegate("up")[0] == 0


@process
def test_a_model_that_no_server_serves_fails_the_start_with_the_reasons(site: Site) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    other = {"name": "other", "engine": "external", "urls": [dead, site.upstream]}
    site.file.write_text(json.dumps({**json.loads(site.file.read_text()), "models": [other]}))
    code, out, err = site.tidegate("up", str(site.file))
    assert (code, "is ready" in out) == (6, False)
    assert "other: served by none of 2 servers" in err
    assert f"{dead}: connection refused" in err
    assert f"{site.upstream}: does not serve 'other', but 'm'" in err
    assert site.pids() == []


@process
@pytest.mark.parametrize("found", [True, False])
def test_a_start_fails_if_no_discovered_server_serves_and_waits_for_none(site: Site, *, found: bool) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    listed = site.file.with_name("servers.json")
    listed.write_text(json.dumps([dead] if found else []))
    model = {"name": "m", "engine": "external", "discovery": {"file": str(listed)}}
    site.file.write_text(json.dumps({**json.loads(site.file.read_text()), "models": [model]}))
    code, out, err = site.tidegate("up", str(site.file))
    assert (code, "is ready" in out) == ((6, False) if found else (0, True))
    if found:
        assert f"m: served by none of 1 server\n  {dead}: connection refused" in err
        assert site.pids() == []


@process
def test_servers_that_do_not_serve_are_named_beside_a_deployed_model(site: Site) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    mixed = document(site)
    mixed["models"].append({"name": "m", "engine": "external", "urls": [site.upstream, dead]})
    out = site.up(mixed)
    assert "m: served by 1 of 2 servers" in out
    assert f"m: {dead}: connection refused" in out
    status = site.status()
    assert {model["name"]: model["ready"] for model in status["models"]}["m"] == 1
    assert len(status["models"]) == 2
    found = {replica["url"]: replica["reason"] for replica in status["fleet"]["replicas"]}
    assert (found[site.upstream], found[dead]) == ("", "connection refused")


@process
@pytest.mark.parametrize("path", ["gateway.port", "gateway.admin_port"])
def test_a_port_in_use_is_reported_before_the_start(site: Site, path: str) -> None:
    port = site.port if path == "gateway.port" else site.admin_port
    with socket.create_server(("127.0.0.1", port)):
        code, _, err = site.tidegate("up", str(site.file))
    assert code == 6
    assert f"{path} 127.0.0.1:{port}" in err
    assert f"pid {os.getpid()}" in err
    assert "Traceback" not in err
    assert list((site.state / "logs").glob("gateway-*")) == []
    assert site.pids() == []


@process
@pytest.mark.parametrize("command", ["down", "up"])
def test_a_killed_supervisor_leaves_no_worker(site: Site, command: str) -> None:
    site.tidegate("up", str(site.file))
    os.kill(supervisor_pid(site), signal.SIGKILL)
    until(lambda: site.pids() == [], "the workers follow their supervisor")
    code, _, _ = site.tidegate(*((command, str(site.file)) if command == "up" else (command,)))
    assert code == 0
    assert (site.status()["supervisor"] is None) == (command == "down")


@process
def test_down_ends_recorded_processes_of_a_killed_supervisor(site: Site) -> None:
    site.tidegate("up", str(site.file))
    workers, supervisor = site.workers(), supervisor_pid(site)
    # Stopped processes do not act on the signal of their supervisor's death.
    for pid in workers.values():
        os.kill(pid, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    assert all(find(pid) for pid in workers.values())
    code, out, _ = site.tidegate("up", str(site.file))
    assert code == 0
    assert all(f"pid {pid}" in out for pid in workers.values())
    assert not any(find(pid) for pid in workers.values())


@process
def test_ctrl_c_during_up_ends_what_was_started(site: Site) -> None:
    # A shell's background job ignores SIGINT, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # It never becomes ready, however late the signal arrives.
    site.file.write_text(json.dumps(document(site, start_s=600)))
    started = site.popen("up", str(site.file), "--no-ray")
    until(lambda: list((site.state / "logs").glob("gateway-*")), "the first worker")
    started.send_signal(signal.SIGINT)
    with started:
        _, err = started.communicate(timeout=120)
    assert (started.returncode, "interrupted" in err) == (130, True)
    assert site.pids() == []


@process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_foreground_run_in_order(site: Site, number: signal.Signals) -> None:
    started = site.popen("up", "--foreground", str(site.file))
    assert started.stdout is not None
    while "Tidegate is ready" not in started.stdout.readline():
        assert started.poll() is None
    started.send_signal(number)
    with started:
        out, err = started.communicate(timeout=120)
    assert (started.returncode, err) == (0, "")
    assert "all processes have stopped" in out
    assert site.pids() == []


@process
def test_a_full_disk_refuses_a_change_with_its_reason_and_no_stop(site: Site) -> None:
    site.tidegate("up", str(site.file))
    supervisor = supervisor_pid(site)
    _, hard = resource.prlimit(supervisor, resource.RLIMIT_FSIZE)
    resource.prlimit(supervisor, resource.RLIMIT_FSIZE, (0, hard))
    site.write(queue_timeout_s=7)
    code, _, err = site.tidegate("apply", str(site.file))
    assert (code != 0, "File too large" in err) == (True, True)
    os.kill(site.workers()["gateway-0"], signal.SIGKILL)
    until(lambda: site.status()["supervisor"]["processes"][0]["restarts"] > 1, "it is tried again")
    code, out, _ = site.tidegate("down")
    assert (code, "all processes have stopped" in out) == (0, True)
    assert site.pids() == []


@pytest.mark.parametrize(
    ("command", "code"),
    [*(("status", 4), ("logs", 4), ("down", 0)), *(("scale m many", 2), ("up /nowhere.yaml", 2))],
)
def test_commands_without_a_deployment_have_their_exit_codes(tmp_path: Path, command: str, code: int) -> None:
    result = CliRunner().invoke(group, ["--state-dir", str(tmp_path), *command.split()])
    failure = result.exception
    assert (exit_of(failure) if isinstance(failure, Exception) else result.exit_code) == code


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    "command",
    ["scale m 1", "mode m single-large", "explain", "explain m", "adapters", "adapters show a", "apply FILE"],
)
def test_commands_say_that_nothing_is_running(tmp_path: Path, command: str, started: bool) -> None:
    site = Site(tmp_path, 1, 2, "http://127.0.0.1:3")
    site.write()
    if started:  # and stopped
        state = StateDir(site.state).ensure()
        state.save(state.deployment_path, json.loads(site.file.read_text()))
    words = command.replace("FILE", str(site.file)).split()
    result = CliRunner().invoke(group, ["--state-dir", str(site.state), *words])
    assert isinstance(result.exception, Unreachable)
    assert str(result.exception) == f"Nothing is running on {site.state}."
    assert exit_of(result.exception) == 4


def test_an_invalid_file_starts_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, 1, 2, "http://127.0.0.1:3")
    site.write(port="x")
    result = CliRunner().invoke(group, ["--state-dir", str(site.state), "up", str(site.file), "--no-ray"])
    assert str(result.exception).startswith("gateway.port: got 'x', expected int")
    assert not site.state.exists()
    site.write(worker=3)
    result = CliRunner().invoke(group, ["check", str(site.file), "--json"])
    assert (result.exit_code, json.loads(result.output)["path"]) == (3, "gateway.worker")


@process
@pytest.mark.parametrize("command", ["up", "run"])
def test_a_policy_that_fails_on_a_sample_view_starts_nothing(tmp_path: Path, command: str) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def decide(self, view, memory):\n        return 1 / 0\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:  # which a start would find first
        port, (admin_port,) = taken.getsockname()[1], free_ports(1)
        site = Site(tmp_path, port, admin_port, "")
        deployment = document(site)
        deployment["models"][0].setdefault("control", {})["policy"] = {"custom": "mine:Mine"}
        site.file.write_text(json.dumps(deployment))
        code, _, err = site.tidegate(command, str(site.file), "--no-ray")
    assert (code, err.count("\n")) == (3, 1)
    assert err.startswith("tidegate: models[sim].control.policy: got ")
    assert "(it raised ZeroDivisionError: division by zero (mine.py:3))" in err
    assert site.pids() == []
