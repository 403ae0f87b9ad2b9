"""A deployment of external servers, driven through the command line as a user does."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.ports import free_ports
from tidegate.supervisor.children import ROOT


@pytest.fixture(autouse=True)
def environment_without_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "TIDEGATE_GATEWAY_HOST", "TIDEGATE_ADMIN_HOST"):
        monkeypatch.delenv(name, raising=False)


class Upstream(http.server.BaseHTTPRequestHandler):
    """A minimal OpenAI-compatible server."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "Paris"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        self._answer({**head, "choices": choices, "usage": usage})

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        return


@pytest.fixture(scope="session")
def upstream() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def until(true: Callable[[], Any], what: str, within_s: float = 120.0) -> Any:
    """Poll until ``true()``; fails with ``what`` did not happen."""
    deadline = time.monotonic() + within_s
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)
    return value


class Command(subprocess.Popen[str]):
    """A process that a failed assertion in its ``with`` block ends, instead of waiting for its end."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


@dataclass(frozen=True)
class Site:
    """One state directory and one deployment file."""

    folder: Path
    port: int
    admin_port: int
    upstream: str

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def file(self) -> Path:
        return self.folder / "deployment.yaml"

    def write(self, **gateway: object) -> None:
        """Write the document with these changes of the gateway's settings."""
        settings = {"port": self.port, "admin_port": self.admin_port, "workers": 2, "drain_timeout_s": 2.0}
        model = {"name": "m", "engine": "external", "urls": [self.upstream]}
        self.file.write_text(json.dumps({"models": [model], "gateway": {**settings, **gateway}}))

    def shipped(self, name: str) -> dict[str, Any]:
        """A document of ``deployments/``, on ports of this site."""
        document: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / name).read_text())
        document["gateway"] |= {"port": self.port, "admin_port": self.admin_port}
        return document | {"cluster": {"controller": f"127.0.0.1:{free_ports(1)[0]}"}}

    def up(self, document: object) -> str:
        """Write a document and start it without Ray; returns the output."""
        self.file.write_text(json.dumps(document))
        code, out, err = self.tidegate("up", str(self.file), "--no-ray", "--timeout-s", "150")
        assert (code, err) == (0, "")
        return out

    def popen(self, *arguments: str) -> Command:
        environment = {**os.environ, "TIDEGATE_STATE_DIR": str(self.state)}
        environment.pop("RAY_ADDRESS", None)
        return Command(
            [sys.executable, "-m", "tidegate", *arguments],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def tidegate(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command to its end: exit code, standard output, standard error."""
        with self.popen(*arguments) as process:
            out, err = process.communicate(timeout=240)
            return process.returncode, out, err

    def status(self) -> dict[str, Any]:
        code, out, _ = self.tidegate("status", "--json")
        answer: dict[str, Any] = json.loads(out)
        assert (answer["supervisor"] is None) == (code == 4)
        return answer

    def pids(self) -> list[int]:
        """The processes of this state directory, from the system instead of the record."""
        running = psutil.process_iter(["cmdline"])
        matching = (process.pid for process in running if str(self.state) in (process.info["cmdline"] or []))
        return [pid for pid in matching if pid != os.getpid()]

    def complete(self, model: str, **headers: str) -> httpx.Response:
        """Request a completion of two tokens from the gateway."""
        body = {"model": model, "prompt": "hello", "max_tokens": 2}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)

    def workers(self) -> dict[str, int]:
        return {entry["name"]: entry["pid"] for entry in self.status()["supervisor"]["processes"]}


@pytest.fixture
def site(tmp_path: Path, upstream: str) -> Iterator[Site]:
    port, admin_port = free_ports(2)
    made = Site(folder=tmp_path, port=port, admin_port=admin_port, upstream=upstream)
    made.write()
    yield made
    made.tidegate("down")
    assert made.pids() == []
