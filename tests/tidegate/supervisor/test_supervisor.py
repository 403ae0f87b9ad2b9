"""The life of a deployment through the command line: real processes, external servers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket

import pytest

from store.process import find
from tests.tidegate.conftest import Site, until

pytestmark = pytest.mark.process


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


def test_up_status_down(site: Site) -> None:
    code, out, err = site.tidegate("up", str(site.file))
    assert (code, err) == (0, "")
    assert f"http://127.0.0.1:{site.port}/v1/chat/completions" in out
    assert "What is the capital of France?" in out

    status = site.status()
    assert status["supervisor"]["phase"] == "ready"
    assert [entry["name"] for entry in status["supervisor"]["processes"]] == ["gateway-0", "gateway-1"]
    assert [(model["name"], model["phase"]) for model in status["models"]] == [("m", "external")]
    assert [replica["url"] for replica in status["fleet"]["replicas"]] == [site.upstream]
    assert get(site.port, "/v1/models") == 200
    code, table, _ = site.tidegate("status")
    assert code == 0
    assert "gateway-1" in table

    code, out, _ = site.tidegate("down")
    assert code == 0
    assert "ended gateway-0" in out
    assert site.pids() == []
    socket.create_server(("127.0.0.1", site.port)).close()
    code, out, _ = site.tidegate("down")
    assert (code, out) == (0, "Nothing is running.\n")


def test_up_twice_is_harmless(site: Site) -> None:
    site.tidegate("up", str(site.file))
    before = site.workers()
    code, out, _ = site.tidegate("up", str(site.file))
    assert code == 0
    assert f"already running at http://127.0.0.1:{site.port}" in out
    # The same settings, one of them written out: the same deployment.
    site.write(queue_timeout_s=60)
    assert site.tidegate("up", str(site.file))[0] == 0
    code, _, err = site.tidegate("run", str(site.file))
    assert code == 6
    assert "already runs" in err
    assert site.workers() == before


def test_up_with_another_document_is_refused_and_changes_nothing(site: Site) -> None:
    site.tidegate("up", str(site.file))
    before = (site.workers(), (site.state / "deployment.json").read_bytes())
    site.write(queue_timeout_s=7)
    code, _, err = site.tidegate("up", str(site.file))
    assert code == 5
    assert "with another deployment file" in err
    assert f"tidegate apply {site.file}" in err
    assert (site.workers(), (site.state / "deployment.json").read_bytes()) == before


def test_without_a_file_up_takes_what_was_applied_last(site: Site) -> None:
    code, _, err = site.tidegate("up")
    assert code == 2
    assert "no deployment file was applied" in err
    site.tidegate("up", str(site.file))
    site.tidegate("down")
    assert site.tidegate("up")[0] == 0


@pytest.mark.parametrize("path", ["gateway.port", "gateway.admin_port"])
def test_a_port_in_use_is_said_before_anything_starts(site: Site, path: str) -> None:
    port = site.port if path == "gateway.port" else site.admin_port
    with socket.create_server(("127.0.0.1", port)):
        code, _, err = site.tidegate("up", str(site.file))
    assert code == 6
    assert f"{path} 127.0.0.1:{port}" in err
    assert f"pid {os.getpid()}" in err
    assert "Traceback" not in err
    assert list((site.state / "logs").glob("gateway-*")) == []
    assert site.pids() == []


def test_a_document_that_is_wrong_starts_nothing(site: Site) -> None:
    site.write(port="x")
    code, _, err = site.tidegate("up", str(site.file))
    assert code == 3
    assert err.startswith("tidegate: gateway.port: got 'x', expected int")
    assert not site.state.exists()


def test_a_worker_that_dies_comes_back_and_the_port_stays(site: Site) -> None:
    site.tidegate("up", str(site.file))
    before = site.workers()
    os.kill(before["gateway-0"], signal.SIGKILL)
    assert get(site.port, "/v1/models") == 200
    until(lambda: site.workers()["gateway-0"] not in (0, before["gateway-0"]), "a new gateway-0")
    restarts = {entry["name"]: entry["restarts"] for entry in site.status()["supervisor"]["processes"]}
    assert restarts == {"gateway-0": 1, "gateway-1": 0}
    assert site.workers()["gateway-1"] == before["gateway-1"]


@pytest.mark.parametrize("command", ["down", "up"])
def test_a_killed_supervisor_leaves_no_worker(site: Site, command: str) -> None:
    site.tidegate("up", str(site.file))
    os.kill(supervisor_pid(site), signal.SIGKILL)
    until(lambda: site.pids() == [], "the workers follow their supervisor")
    code, _, _ = site.tidegate(*((command, str(site.file)) if command == "up" else (command,)))
    assert code == 0
    assert (site.status()["supervisor"] is None) == (command == "down")


def test_what_outlives_its_supervisor_is_ended_by_record(site: Site) -> None:
    site.tidegate("up", str(site.file))
    workers = site.workers()
    # Stopped processes do not act on the signal that their supervisor's death sends.
    for pid in workers.values():
        os.kill(pid, signal.SIGSTOP)
    os.kill(supervisor_pid(site), signal.SIGKILL)
    for pid in workers.values():
        assert find(pid) is not None
    code, out, _ = site.tidegate("up", str(site.file))
    assert code == 0
    assert all(f"pid {pid}" in out for pid in workers.values())
    assert not any(find(pid) for pid in workers.values())


def test_ctrl_c_during_up_ends_what_was_started(site: Site) -> None:
    site.write(workers=3)
    process = site.popen("up", str(site.file))
    until(lambda: list((site.state / "logs").glob("gateway-*")), "the first worker")
    process.send_signal(signal.SIGINT)
    with process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in err
    assert site.pids() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_foreground_run_in_order(site: Site, number: signal.Signals) -> None:
    process = site.popen("up", "--foreground", str(site.file))
    assert process.stdout is not None
    while "Tidegate is ready" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    with process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "nothing is left running" in out
    assert site.pids() == []


def test_apply_is_whole_or_not_at_all(site: Site) -> None:
    site.tidegate("up", str(site.file))
    stored = site.state / "deployment.json"
    before = stored.read_bytes()
    assert site.tidegate("apply", "--dry-run", str(site.file))[1] == "No changes.\n"
    written = stored.stat().st_ino
    # It is sent all the same: it tries again what failed.
    assert site.tidegate("apply", str(site.file))[1] == "No changes.\n"
    assert stored.stat().st_ino != written

    site.write(queue_timeout_s=7, port=site.port + 1)
    code, out, err = site.tidegate("apply", str(site.file))
    assert code == 5
    assert "only after down and up" in out
    assert f"gateway.port: got {site.port + 1}, expected {site.port}" in err
    assert stored.read_bytes() == before

    site.write(queue_timeout_s=7)
    code, out, _ = site.tidegate("apply", str(site.file), "--dry-run", "--json")
    (change,) = json.loads(out)["changes"]
    assert (change["path"], change["after"], change["effect"]) == ("gateway.queue_timeout_s", 7.0, "live")
    assert stored.read_bytes() == before

    code, out, _ = site.tidegate("apply", str(site.file))
    assert code == 0
    assert "Applied." in out
    assert json.loads(stored.read_bytes())["gateway"]["queue_timeout_s"] == 7


def test_logs_are_kept_by_part(site: Site) -> None:
    site.tidegate("up", str(site.file))
    code, out, _ = site.tidegate("logs", "supervisor", "-n", "1")
    assert code == 0
    assert "ready" in out
    code, out, _ = site.tidegate("logs")
    assert "gateway-0" in out
    code, _, err = site.tidegate("logs", "nobody")
    assert code == 2
    assert "gateway-0" in err


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("status",), 4),
        (("logs",), 4),
        (("scale", "m", "1"), 4),
        (("mode", "m", "single-large"), 4),
        (("down",), 0),
        (("scale", "m", "many"), 2),
        (("mode", "m", "enormous"), 2),
        (("up", "/nowhere.yaml"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_commands_without_a_deployment_say_so(site: Site, command: tuple[str, ...], code: int) -> None:
    answer, _, err = site.tidegate(*command)
    assert answer == code
    assert "Traceback" not in err


def test_external_models_have_no_replicas_to_scale(site: Site) -> None:
    site.tidegate("up", str(site.file))
    code, _, err = site.tidegate("scale", "m", "2")
    assert code == 5
    assert "external" in err


def test_check_says_what_is_wrong(site: Site) -> None:
    assert site.tidegate("check", str(site.file))[0] == 0
    site.write(worker=3)
    code, out, _ = site.tidegate("check", str(site.file), "--json")
    assert code == 3
    assert json.loads(out)["path"] == "gateway.worker"
