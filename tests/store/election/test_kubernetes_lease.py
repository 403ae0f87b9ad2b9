"""The lease as a Lease of Kubernetes, against a double that refuses writes of an old version."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from msgspec.structs import replace

from policy.config.control import KubernetesLease
from policy.errors import Unreachable
from policy.leader_election import LeaderLease
from store.kubernetes.lease import KubernetesLeaseStore

PATH = "/apis/coordination.k8s.io/v1/namespaces/prod/leases"


class ApiServer(ThreadingHTTPServer):
    """One Lease, ``found`` as JSON."""

    found: dict[str, Any] | None = None
    version = 0


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        assert self.path == f"{PATH}/tidegate-controller"
        self._answer(404 if self.server.found is None else 200)

    def do_POST(self) -> None:
        assert self.path == PATH
        self._write(conflicts=self.server.found is not None)

    def do_PUT(self) -> None:
        self._write(conflicts=self.server.found is None)

    def _write(self, *, conflicts: bool) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        version = body["metadata"].pop("resourceVersion", None)
        if conflicts or (version is not None and version != str(self.server.version)):
            self._answer(409)
            return
        self.server.version += 1
        body["metadata"]["resourceVersion"] = str(self.server.version)
        self.server.found = body
        self._answer(200)

    def _answer(self, status: int) -> None:
        data = json.dumps(self.server.found if status == 200 else {"reason": "no"}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        return


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_one_of_two_candidates_replaces_the_lease(api: ApiServer) -> None:
    named = KubernetesLease(namespace="prod", api=f"http://127.0.0.1:{api.server_port}")
    one, two = KubernetesLeaseStore(named), KubernetesLeaseStore(named)
    assert one.read() is None and two.read() is None
    first = LeaderLease(holder="a 1", address="a:1", term=1, lease_s=2.5, acquired_at=1.25, renewed_at=1.25)
    other = replace(first, holder="b 2", address="b:1", term=2)
    assert one.replace(None, first) and not two.replace(None, other)
    assert api.found is not None and api.found["spec"] == {
        "holderIdentity": "a 1", "leaseDurationSeconds": 3, "leaseTransitions": 1,
        "acquireTime": "1970-01-01T00:00:01.250000Z", "renewTime": "1970-01-01T00:00:01.250000Z",
    }  # fmt: skip
    assert two.read() == first
    renewed = replace(first, renewals=1, renewed_at=1 / 3)
    assert one.replace(first, renewed) and one.read() == renewed
    # What it read is not there any more.
    assert not two.replace(first, other)
    seen = two.read()
    assert seen is not None and two.replace(seen, other)
    assert one.read() == other
    assert two.replace(other, replace(other, renewals=1, released=True))
    released = one.read()
    assert released is not None and (released.released, released.address) == (True, "b:1")
    # The Lease is deleted, and another process takes the same term, with as many renewals.
    api.found = None
    assert two.read() is None and two.replace(None, other) and one.read() == other
    api.found = None
    mine = replace(other, holder="a 1", address="a:1")
    assert two.read() is None and two.replace(None, mine)
    assert one.read() == mine
    api.found = None
    assert not two.replace(two.read() or other, other) and two.read() is None


def test_an_api_server_that_does_not_answer_is_unreachable() -> None:
    store = KubernetesLeaseStore(KubernetesLease(namespace="prod", api="http://127.0.0.1:9"))
    with pytest.raises(Unreachable, match="Kubernetes does not answer"):
        store.read()
