"""Where replica hosts of a test beat: the replicas as they last said they were."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from policy.scaling.rollout import LayerKey
from policy.types import Replica, ReplicaPhase
from policy.wire.headers import SECRET_HEADER
from policy.wire.heartbeat import Heartbeat, Orders


@dataclass
class Heard:
    """The replicas that are not stopped, by id; ``states`` keeps what each went through."""

    replicas: dict[str, Replica] = field(default_factory=dict)
    states: dict[str, list[ReplicaPhase]] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)

    def beat(self, replica: Replica) -> Orders | None:
        seen = self.states.setdefault(replica.id, [])
        if not seen or seen[-1] is not replica.state:
            seen.append(replica.state)
        self.replicas[replica.id] = replica
        if replica.state is ReplicaPhase.STOPPED:
            del self.replicas[replica.id]
        return Orders(leave=self.leaving[replica.id]) if replica.id in self.leaving else None

    def of(self, key: LayerKey, state: ReplicaPhase) -> dict[str, int]:
        return {
            replica.id: replica.pid
            for replica in list(self.replicas.values())
            if (replica.model, replica.shape, replica.generation) == (key.model, key.shape, key.generation)
            and replica.state is state
        }


@contextmanager
def listening(beat: Callable[[Replica], Orders | None], port: int, secret: str) -> Iterator[None]:
    """The least of a controller: ``POST /replicas`` behind the secret, answered with what ``beat`` says."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            known = self.path == "/replicas" and self.headers[SECRET_HEADER] == secret
            orders = beat(msgspec.json.decode(body, type=Heartbeat).replica) if known else None
            answer = b"" if orders is None else msgspec.json.encode(orders)
            self.send_response(200 if known else 401)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
