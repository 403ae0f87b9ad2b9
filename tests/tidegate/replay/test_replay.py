"""``replay``: a table, JSON, a record, a capture, and refusals that name the line or the option."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from policy.errors import Unreachable
from sim.workload.traces.detect_format import open_trace
from store.state_dir import StateDir
from tests.tidegate.replay.endpoint import Endpoint
from tidegate.cli import group
from tidegate.exit_codes import ExitCode
from tidegate.replay.capture_to_trace import CaptureFile

HEADER = '{"tidegate":"capture","version":1,"block_tokens":512}\n'


def run(*words: str | Path, state: Path = Path("/nonexistent")) -> Result:
    return CliRunner().invoke(group, ["--state-dir", str(state), "replay", *map(str, words)])


def trace(folder: Path, *instants: float) -> Path:
    path = folder / "trace.jsonl"
    lines = [json.dumps({"at": at, "input_tokens": 30, "output_tokens": 4}) for at in instants]
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return path


def test_replay_prints_a_table_and_writes_a_record(endpoint: Endpoint, tmp_path: Path) -> None:
    path = trace(tmp_path, 0.0, 0.01, 0.02)
    result = run(path, "--url", endpoint.url, "--record", tmp_path / "rows.jsonl", "--seed", "3")
    assert result.exit_code == 0, result.output
    for words in ("model base, seed 3", "TTFT", "ITL", "E2E", "sent late", "3 of 3 requests served"):
        assert words in result.stdout
    assert "90 input and 12 output tokens" in result.stdout
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_the_json_has_the_documented_keys(endpoint: Endpoint, tmp_path: Path) -> None:
    result = run(trace(tmp_path, 0.0, 0.01), "--url", endpoint.url, "--json")
    document = json.loads(result.stdout)
    assert list(document) == [
        "trace", "url", "model", "seed", "requests", "sent", "served", "failed", "cut", "duration_s",
        "input_tokens", "output_tokens", "ttft_s", "itl_s", "e2e_s", "late_s", "late", "kept_pace",
        "error", "exact", "tokens_per_word", "interrupted",
    ]  # fmt: skip
    assert (document["requests"], document["served"], document["failed"], document["interrupted"]) == (
        2,
        2,
        {},
        False,
    )
    assert list(document["ttft_s"]) == ["mean", "p50", "p90", "p95", "p99", "max"]


def test_a_part_of_the_trace_can_be_replayed_at_another_rate(endpoint: Endpoint, tmp_path: Path) -> None:
    path = trace(tmp_path, 0.0, 10.0, 10.02, 10.04, 20.0)
    rows = tmp_path / "rows.jsonl"
    result = run(
        path, "--url", endpoint.url, "--from-s", "10", "--to-s", "20", "--rate", "2", "--limit", "2",
        "--record", rows,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    due = sorted(row["at"] - row["late_s"] for row in map(json.loads, rows.read_text().splitlines()))
    assert due == pytest.approx([0.0, 0.01])


def test_a_bad_line_is_refused_before_anything_is_sent(endpoint: Endpoint, tmp_path: Path) -> None:
    path = trace(tmp_path, 0.0, 0.1, 0.05)
    result = run(path, "--url", endpoint.url)
    assert result.exit_code and f"{path}:4: got" in str(result.exception)
    assert endpoint.asked == []


def test_notes_on_a_trace_are_printed(endpoint: Endpoint, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("Timestamp,Model,Request tokens,Response tokens\n0,,9,0\n0.01,,30,4\n")
    result = run(path, "--url", endpoint.url)
    assert result.exit_code == 0, result.output
    assert "mine.csv: 1 of 2 rows are failed requests, left out" in result.stderr
    assert "1 of 1 requests served" in result.stdout


def test_a_replay_without_a_served_request_fails(endpoint: Endpoint, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"at": 0, "input_tokens": 30, "output_tokens": 4, "adapter": "none"}
    path.write_text(HEADER + json.dumps(line) + "\n")
    result = run(path, "--url", endpoint.url)
    assert result.exit_code == ExitCode.FAILED
    assert "1 failed with status 404" in result.stdout
    assert "First failure: The model `none` does not exist." in result.stdout


def test_ctrl_c_ends_a_replay_with_the_results_so_far(endpoint: Endpoint, tmp_path: Path) -> None:
    asked = [0]

    def on_ask() -> None:
        asked[0] += 1
        if asked[0] == 4:  # the second of the trace, after two probes
            os.kill(os.getpid(), signal.SIGINT)

    endpoint.on_ask = on_ask
    result = run(trace(tmp_path, 0.0, 0.05, 3600.0), "--url", endpoint.url)
    assert result.exit_code == ExitCode.INTERRUPTED
    assert "Interrupted: " in result.stdout and "1 not sent" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either a TRACE to replay or --capture FILE"),
        (("T", "--capture", "x"), "give either a TRACE to replay or --capture FILE"),
        (("T", "--for", "9s"), "--for is only for --capture"),
        (("T", "--url", "ftp://x"), "is not a URL"),
        (("T", "--url", "http://[x"), "is not a URL"),
        (("T", "--from-s", "5", "--to-s", "5"), "is not after --from-s 5"),
        (("T", "--from-s", "5"), "no requests in the selected part"),
        (("T", "--record", "/nowhere/rows"), "expected a file in a folder that exists"),
        (("--capture", "T"), "the file exists already"),
        (("--capture", "P"), "P.part: the file exists already"),
    ],
)
def test_an_error_names_the_option_or_line(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    path = trace(tmp_path, 0.0)
    (tmp_path / "P.part").touch()
    names = {"T": path, "P": tmp_path / "P"}
    result = run(*(names.get(word, word) for word in words))
    assert result.exit_code
    assert message in result.output.replace("\n", " ")


class Admin(http.server.BaseHTTPRequestHandler):
    """A gateway's admin port that sends ``lines`` and ends the capture."""

    protocol_version = "HTTP/1.0"
    lines: ClassVar[str] = ""
    status: ClassVar[int] = 200
    goes_on: ClassVar[bool] = False
    tokens: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        assert self.path == "/admin/capture"
        self.tokens.append(self.headers["authorization"])
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.lines.encode())
        if self.goes_on:
            self.rfile.read()  # until the client leaves

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None: ...


@pytest.fixture
def admin() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Admin)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_capture_is_written_as_a_trace(admin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, early = (json.dumps({"at": at, "input_tokens": 5, "output_tokens": 2}) for at in (9.0, 4.0))
    monkeypatch.setattr(Admin, "lines", f'{HEADER}{late}\n{early}\n{{"lost":3}}\n')
    path = tmp_path / "own.jsonl"
    result = run("--capture", path, "--admin-url", admin, "--json")
    assert result.exit_code == ExitCode.FAILED  # it was not ended here
    assert "the gateway ended the capture" in result.stderr and "3 more requests were lost" in result.stderr
    assert json.loads(result.stdout) == {"file": str(path), "requests": 2, "lost": 3, "whole": False}
    assert [arrival.at for arrival in open_trace(path)] == [0.0, 5.0]
    assert [path.name for path in tmp_path.iterdir()] == ["own.jsonl"]


def test_ctrl_c_completes_a_capture(admin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = CaptureFile.feed

    def received(spool: CaptureFile, data: bytes, at: float) -> None:
        feed(spool, data, at)
        if spool.requests:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(CaptureFile, "feed", received)
    monkeypatch.setattr(Admin, "goes_on", True)
    monkeypatch.setattr(Admin, "lines", HEADER + '{"at":1,"input_tokens":5,"output_tokens":2}\n')
    path = tmp_path / "own.jsonl"
    result = run("--capture", path, "--admin-url", admin)
    assert result.exit_code == 0, result.output
    assert f"1 request written to {path}" in result.stdout
    assert [arrival.input_tokens for arrival in open_trace(path)] == [5]


def test_a_capture_that_never_began_leaves_no_file(
    admin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to be complete, with an empty trace."""
    monkeypatch.setattr(Admin, "goes_on", True)
    result = run("--capture", tmp_path / "own.jsonl", "--admin-url", admin, "--for", "0.1s")
    assert isinstance(result.exception, Unreachable) and admin in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_capture_sends_the_token_of_the_state_directory(
    admin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admin, "tokens", [])
    token = StateDir(tmp_path).admin_token()
    run("--capture", tmp_path / "own.jsonl", "--admin-url", admin, state=tmp_path)
    assert Admin.tokens == [f"Bearer {token}"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": 404}, "answered 404"),
        ({"status": 401}, "TIDEGATE_ADMIN_TOKEN"),
        ({"lines": "<html>\n"}, "no line of a capture"),
        ({"lines": ""}, "answered 200"),
    ],
)
def test_only_a_gateway_can_be_captured(
    admin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object], message: str
) -> None:
    for name, value in answer.items():
        monkeypatch.setattr(Admin, name, value)
    result = run("--capture", tmp_path / "own.jsonl", "--admin-url", admin)
    assert result.exit_code and message in str(result.exception)
    assert list(tmp_path.iterdir()) == []
