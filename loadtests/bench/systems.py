"""The gateways that are compared: how each is installed, started and known to be ready.

Peers are installed on demand from ``requirements/``, each into its own virtual environment in a folder of the
user's; an existing environment is reused.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtests.bench.processes import ROOT, ProcessTree, free_ports
from loadtests.bench.upstream_answers import BODY
from loadtests.bench.workload import KEY, chat
from store.state_dir import StateDir
from tidegate.supervisor.command_lines import gateway_worker

REQUIREMENTS = Path(__file__).parent / "requirements"


@dataclass(frozen=True)
class PeerRouter:
    """A router for OpenAI-compatible servers: its Python package and its policies that are measured."""

    name: str
    package: str
    policies: tuple[str, ...]
    log_level: str

    @property
    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"

    @property
    def version(self) -> str:
        """The version in its requirements."""
        return self.requirements.read_text().strip().partition("==")[2]

    def python(self, folder: Path) -> Path:
        return folder / self.name / "bin" / "python"

    def installed(self, folder: Path) -> bool:
        """Whether its environment is complete."""
        python = self.python(folder)
        if not python.exists():
            return False
        asked = subprocess.run(
            [python, "-m", f"{self.package}.launch_router", "--help"],
            capture_output=True,
            timeout=60,
            check=False,
        )
        return asked.returncode == 0

    def install(self, folder: Path) -> None:
        """Create its environment; raises ``subprocess.CalledProcessError`` when pip fails."""
        if not self.python(folder).exists():
            venv.create(folder / self.name, with_pip=True)
        pip = [str(self.python(folder)), "-m", "pip", "install", "--quiet", "-r", str(self.requirements)]
        subprocess.run(pip, check=True, stdout=sys.stderr)

    def argv(
        self, python: Path, policy: str, urls: Sequence[str], port: int, metrics: int, *, retries: bool
    ) -> list[str]:
        """The command line: one worker, no access log, default retries or none."""
        return [
            str(python),
            *("-m", f"{self.package}.launch_router", "--log-level", self.log_level),
            *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls),
            *("--policy", policy, "--prometheus-port", str(metrics)),
            *(() if retries else ("--disable-retries",)),
        ]


PEERS = (
    PeerRouter("vllm-router", "vllm_router", ("round_robin", "cache_aware", "consistent_hash"), "warning"),
    PeerRouter("smg", "smg", ("round_robin", "cache_aware", "prefix_hash"), "warn"),
    PeerRouter("sglang-router", "sglang_router", ("round_robin", "cache_aware"), "warn"),
)


def available(folder: Path | None, wanted: Sequence[PeerRouter]) -> tuple[dict[str, Path], dict[str, str]]:
    """Interpreters of the peers that can run, and the reasons for the others; missing ones are installed."""
    pythons: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    for peer in wanted:
        if folder is None:
            left_out[peer.name] = "no --peers-dir"
            continue
        try:
            if not peer.installed(folder):
                sys.stderr.write(f"installing {peer.name} into {folder}\n")
                peer.install(folder)
            if peer.installed(folder):
                pythons[peer.name] = peer.python(folder)
            else:
                left_out[peer.name] = "it was installed, but does not start"
        except (OSError, subprocess.SubprocessError) as error:
            left_out[peer.name] = str(error)
    return pythons, left_out


READY_S = 60.0
LIMITS = {
    "rpm_limit": 1_000_000_000, "tpm_limit": 1_000_000_000_000, "max_parallel_requests": 1_000_000,
    "max_budget": 1e9,
}  # fmt: skip


@dataclass(frozen=True)
class BenchmarkedSystem:
    """One column of the comparison: Tidegate with a number of workers, or a peer with a policy.

    Tidegate that is ``traced`` sends the traces of 1 % of the requests to the upstream; ``limited``, the
    tenant has all limits, none of which is ever reached. ``clone``: another clone of this repository runs it,
    in its environment ``.venv``.
    """

    name: str
    peer: PeerRouter | None = None
    policy: str = ""
    workers: int = 1
    python: Path | None = None
    traced: bool = False
    limited: bool = False
    clone: Path | None = None

    @property
    def ours(self) -> bool:
        return self.peer is None


@dataclass
class RunningSystem:
    """A ready system on ``port``; it took ``cold_start_s`` seconds to start."""

    system: BenchmarkedSystem
    port: int
    tree: ProcessTree
    cold_start_s: float = 0.0


def document(
    urls: Sequence[str], *, adapters: int = 8, traced: bool = False, limited: bool = False
) -> dict[str, object]:
    """Tidegate's deployment with all features: weighted tenants, an SLO, adapters; traces and limits."""
    key = hashlib.sha256(KEY.encode()).hexdigest()
    other = hashlib.sha256(b"sk-other").hexdigest()
    return {
        "models": [
            {
                "name": "alpha",
                "engine": "external",
                "urls": list(urls),
                "adapters": {"slots_per_replica": adapters},
                # Never limiting: the upstream computes no prompts.
                "control": {"slo": {"ttft_p95_s": 60.0}},
            }
        ],
        "tracing": {"endpoint": urls[0] if traced else "", "sample_ratio": 0.01},
        "tenants": [
            {"name": "bench", "keys_sha256": [key], "weight": 2.0, **(LIMITS if limited else {})},
            {"name": "other", "keys_sha256": [other]},
        ],
    }


@contextmanager
def running(
    system: BenchmarkedSystem, urls: Sequence[str], cores: Sequence[int], *, retries: bool = False
) -> Iterator[RunningSystem]:
    """``system`` in front of the servers at ``urls``, on ``cores``; raises RuntimeError when it fails."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tree = ProcessTree(root / "log.txt")
        stack.callback(tree.stop)
        began = time.perf_counter()
        if system.peer is None:
            client, admin = (
                stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048)) for _ in "ab"
            )
            (root / "deployment.json").write_text(
                json.dumps(document(urls, traced=system.traced, limited=system.limited))
            )
            for worker in range(system.workers):
                part = gateway_worker(StateDir(root), worker, client.fileno(), admin.fileno())
                argv = list(part.argv)
                if system.clone is not None:
                    argv[0] = str(system.clone / ".venv/bin/python")
                tree.start(argv, cores, cwd=system.clone or ROOT, env=part.env, fds=part.fds)
            port = client.getsockname()[1]
        else:
            assert system.python is not None
            port, metrics = free_ports(2)
            argv = system.peer.argv(system.python, system.policy, urls, port, metrics, retries=retries)
            tree.start(argv, cores, cwd=root)
        found = RunningSystem(system, port, tree)
        _wait(found, began, probes=system.workers * 8)
        found.cold_start_s = time.perf_counter() - began if system.workers > 1 else found.cold_start_s
        yield found


def _wait(found: RunningSystem, began: float, probes: int) -> None:
    """Wait until ``probes`` requests in a row, on new connections, get the upstream's answer."""
    good = 0
    while good < probes:
        found.tree.check()
        if time.perf_counter() - began > READY_S:
            raise RuntimeError(f"{found.system.name} is not ready after {READY_S:.0f} s: {found.tree.tail()}")
        if _answers(found.port):
            good += 1
            found.cold_start_s = found.cold_start_s or time.perf_counter() - began
        else:
            good = 0
            time.sleep(0.01)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    try:
        connection.request("POST", "/v1/chat/completions", chat("ready?"), headers)
        answer = connection.getresponse()
        return answer.status == 200 and answer.read() == BODY
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
