"""All checks on this machine, with what they need to know: the composition root of ``tidegate doctor``."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import msgspec

from policy.config.deployment import Deployment
from policy.config.engine_revision import used_shapes
from policy.config.port_conflicts import ListenAddress, listeners
from policy.errors import ConfigError
from policy.types import EngineKind
from policy.wire.controller_reports import GpuReport
from serve.actuator.gpu_cards import cards_of_machine
from serve.actuator.placement_feasibility import check_placeable, machine
from serve.gpu_inventory import GpuInventory, read_inventory
from serve.host.version_check import installed
from serve.internode_bandwidth import BandwidthReport
from serve.ray_launcher import OBJECT_STORE_BYTES
from store import compiled_modules
from store.state_dir import StateDir, cache_dir
from tidegate.doctor import deployment as of_deployment
from tidegate.doctor import gpus, host
from tidegate.doctor.finding import Finding, by_importance, error, not_applicable
from tidegate.supervisor import preflight
from tidegate.supervisor.control_socket import SupervisorStatus
from tidegate.supervisor.process_record import ProcessRecord

_NVIDIA, _DISPLAY = "0x10de", "0x03"
_SHOWN = ("tidegate", "ray", "torch")
_MEASURE_S = 120.0
_CUDA = re.compile(r"^cuda\b.*?=\s*'(\d+)\.(\d+)'", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """What is checked: this machine, a ``deployment``, and what ``runs`` on the state directory.

    ``raw`` is the deployment as a document. ``reports`` are those of the GPUs of running replicas, ``None``
    if no controller answers.
    """

    state: StateDir
    at: float
    deployment: Deployment | None = None
    raw: object = None
    runs: SupervisorStatus | None = None
    running: Deployment | None = None
    reports: Mapping[str, GpuReport] | None = None

    @property
    def is_local(self) -> bool:
        """Whether the deployment starts engines on this machine."""
        deployment = self.deployment
        return deployment is not None and deployment.deploys and deployment.cluster.address == "local"

    @property
    def gpus_per_replica(self) -> int:
        """The most GPUs of one replica on this machine."""
        specs = self.deployment.models if self.deployment is not None and self.is_local else ()
        # Simulated engines use none.
        real = (spec for spec in specs if spec.engine is EngineKind.VLLM)
        return max(
            (int(shape.gpus) or bool(shape.gpus) for spec in real for shape in used_shapes(spec).values()),
            default=0,
        )


def run_checks(subject: CheckContext) -> list[Finding]:
    """All checks; the worst results first, and those of one level from the most important check down."""
    return by_importance(
        [*_installation(subject), *_gpus(subject), *_machine(subject), *_surroundings(subject)]
    )


def _installation(subject: CheckContext) -> Iterator[Finding]:
    about = metadata.metadata("tidegate")
    yield host.python(platform.python_version(), about["Requires-Python"])
    yield host.packages(metadata.requires("tidegate") or (), _version, _SHOWN)
    models = subject.deployment.models if subject.deployment is not None and subject.is_local else ()
    engines = [spec for spec in models if spec.engine is EngineKind.VLLM]
    shapes = [shape for spec in engines for shape in used_shapes(spec).values()]
    yield host.engine(
        installed().vllm,
        wanted=bool(engines),
        on_cpu=any(not shape.gpus for shape in shapes),
        cpu_flags=_cpu_flags(),
    )


def _gpus(subject: CheckContext) -> Iterator[Finding]:
    found = read_inventory()
    wanted = subject.gpus_per_replica
    yield gpus.driver(found, present=_has_gpu(), wanted=wanted > 0, torch_cuda=_torch_cuda())
    if isinstance(found, GpuInventory):
        yield _cards(subject, found)
        if found.cards:
            yield gpus.memory_errors(found)
            yield gpus.clocks(found)
            yield gpus.topology(found, wanted)
            yield gpus.pcie(found)
            yield gpus.persistence(found)
    yield gpus.replicas(subject.reports)


def _cards(subject: CheckContext, found: GpuInventory) -> Finding:
    if subject.deployment is not None and subject.is_local:
        try:
            check_placeable(
                subject.deployment, machine(cards_of_machine(subject.deployment.cluster, os.environ))
            )
        except ConfigError as problem:
            return error("GPUs", str(problem), "use shapes that this machine can hold")
    return gpus.cards(found, running=subject.runs is not None)


def _machine(subject: CheckContext) -> Iterator[Finding]:
    models = subject.deployment.models if subject.deployment is not None and subject.is_local else ()
    here = [spec for spec in models if spec.engine is EngineKind.VLLM and subject.runs is None]
    sizes = {
        spec.name: preflight.weights_bytes(Path(spec.source)) for spec in here if spec.source.startswith("/")
    }
    needs = preflight.memory_needs(subject.deployment, sizes) if subject.deployment and here else {}
    yield host.memory(
        preflight.available_memory(), needs, [spec.name for spec in here if spec.name not in sizes]
    )
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - only its size
    yield host.shared_memory(
        shared.total if shared else 0,
        shared.free if shared else 0,
        ray_bytes=OBJECT_STORE_BYTES if subject.is_local and subject.runs is None else 0,
        gpus_per_replica=subject.gpus_per_replica,
    )
    yield host.disk(host.free_disk([subject.state.root, cache_dir("models"), Path(tempfile.gettempdir())]))


def _surroundings(subject: CheckContext) -> Iterator[Finding]:
    deployment = subject.deployment
    if deployment is None:
        yield not_applicable("ports", "name a deployment file to check its ports, memory and cluster")
    else:
        ray = subject.runs is None or subject.runs.actuator == "ray"
        yield of_deployment.ports(listeners(deployment, ray=ray), _held(subject, ray))
        ours = {entry.pid for entry in ProcessRecord(subject.state).living()}
        yield of_deployment.ray(deployment, lambda: preflight.foreign_ray(ours), os.environ)
    yield host.descriptors(_hard_limit())
    yield from of_deployment.certificates(deployment, subject.at)
    yield of_deployment.network(deployment, lambda _: _measure(subject))
    yield host.compiled(compiled_modules.state()[1])


def _held(subject: CheckContext, ray: bool) -> tuple[ListenAddress, ...]:
    return () if subject.running is None else listeners(subject.running, ray=ray)


def _measure(subject: CheckContext) -> BandwidthReport:
    """Run in a process of its own, as only that may load Ray."""
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "serve.internode_bandwidth", "--state", str(subject.state.root)],
            input=msgspec.json.encode(subject.raw),
            capture_output=True,
            timeout=_MEASURE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return BandwidthReport(error=f"no answer of the cluster within {_MEASURE_S:.0f} s")
    if ran.stdout:
        return msgspec.json.decode(ran.stdout.splitlines()[-1], type=BandwidthReport)
    return BandwidthReport(
        error=ran.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "no answer"
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _hard_limit() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _has_gpu() -> bool:
    """Whether the PCI bus has a display controller of NVIDIA, with or without a driver."""
    return any(
        (device / "vendor").read_text().strip() == _NVIDIA
        and (device / "class").read_text().startswith(_DISPLAY)
        for device in Path("/sys/bus/pci/devices").glob("*")
    )


def _torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that the installed torch is built for, read without loading it."""
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text()
    built = _CUDA.search(text)
    return (int(built[1]), int(built[2])) if built else None
