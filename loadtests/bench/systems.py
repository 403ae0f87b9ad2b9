"""The gateways that are compared: how each is started, and when it is ready."""

from __future__ import annotations

import hashlib
import json
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loadtests.bench.answers import BODY
from loadtests.bench.mock import ROOT, free_ports
from loadtests.bench.peers import Peer
from loadtests.bench.tree import Tree
from loadtests.bench.workload import KEY, chat, request
from store.state import StateDir
from tidegate.parts import gateway_worker

READY_S = 60.0


@dataclass(frozen=True)
class System:
    """One column of the comparison: Tidegate with a number of workers, or a peer with a policy."""

    name: str
    peer: Peer | None = None
    policy: str = ""
    workers: int = 1
    python: Path | None = None

    @property
    def ours(self) -> bool:
        """Whether it is Tidegate."""
        return self.peer is None


@dataclass
class Running:
    """A system that answers: on ``port``, ``cold_start_s`` after it was started."""

    system: System
    port: int
    tree: Tree
    cold_start_s: float = 0.0
    resources: ExitStack = field(default_factory=ExitStack)


def document(urls: Sequence[str], *, adapters: int = 8) -> dict[str, object]:
    """Tidegate's deployment with everything on: tenants with weights, a service level, adapters."""
    key = hashlib.sha256(KEY.encode()).hexdigest()
    other = hashlib.sha256(b"sk-other").hexdigest()
    return {
        "models": [
            {
                "name": "alpha",
                "engine": "external",
                "urls": list(urls),
                "adapters": {"slots_per_replica": adapters},
                # Never in the way: the upstream computes no prompt, however long.
                "control": {"slo": {"ttft_p95_s": 60.0}},
            }
        ],
        "tenants": [
            {"name": "bench", "keys_sha256": [key], "weight": 2.0},
            {"name": "other", "keys_sha256": [other]},
        ],
    }


@contextmanager
def running(
    system: System, urls: Sequence[str], cores: Sequence[int], *, retries: bool = False
) -> Iterator[Running]:
    """``system`` in front of the servers at ``urls``, on ``cores``; raises RuntimeError when it fails."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tree = Tree(root / "log.txt")
        stack.callback(tree.stop)
        began = time.perf_counter()
        if system.peer is None:
            client, admin = (
                stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048)) for _ in "ab"
            )
            (root / "deployment.json").write_text(json.dumps(document(urls)))
            for worker in range(system.workers):
                part = gateway_worker(StateDir(root), worker, client.fileno(), admin.fileno())
                tree.start(part.argv, cores, cwd=ROOT, env=part.env, fds=part.fds)
            port = client.getsockname()[1]
        else:
            assert system.python is not None
            port, metrics = free_ports(2)
            argv = system.peer.argv(system.python, system.policy, urls, port, metrics, retries=retries)
            tree.start(argv, cores, cwd=root)
        found = Running(system, port, tree)
        _wait(found, began, probes=system.workers * 8)
        found.cold_start_s = time.perf_counter() - began if system.workers > 1 else found.cold_start_s
        yield found


def _wait(found: Running, began: float, probes: int) -> None:
    """Until it answers as the upstream does, ``probes`` times in a row on new connections."""
    asked = request(chat("ready?"))
    good = 0
    while good < probes:
        found.tree.check()
        if time.perf_counter() - began > READY_S:
            raise RuntimeError(f"{found.system.name} is not ready after {READY_S:.0f} s: {found.tree.tail()}")
        if _answers(found.port, asked):
            good += 1
            found.cold_start_s = found.cold_start_s or time.perf_counter() - began
        else:
            good = 0
            time.sleep(0.01)


def _answers(port: int, asked: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(asked)
            answer = b""
            while not answer.endswith(BODY):
                data = connection.recv(65536)
                if not data:
                    return False
                answer += data
                if not answer.startswith(b"HTTP/1.1 200"[: len(answer)]):
                    return False
    except OSError:
        return False
    return True
