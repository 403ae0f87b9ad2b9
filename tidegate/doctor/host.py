"""Checks of this machine and this installation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gateway.http.server import SPARE_DESCRIPTORS
from store.os_process import MAX_DESCRIPTORS
from tidegate.doctor.finding import Finding, error, not_applicable, ok, warning

_GIB = 1024**3
_LOW_DISK_BYTES, _NO_DISK_BYTES = 10 * _GIB, _GIB
# What the container documentation sets; processes of one replica with several GPUs share memory through it.
_SHARED_BYTES = 2 * _GIB
# A worker with fewer cannot hold the connections of one busy client.
_FEW_DESCRIPTORS = 4096


def python(version: str, supported: str) -> Finding:
    """The interpreter."""
    if SpecifierSet(supported).contains(version):
        return ok("Python", version)
    return error("Python", f"{version}, expected {supported}", "install Tidegate with a supported version")


def packages(
    requirements: Iterable[str], version: Callable[[str], str | None], shown: Sequence[str]
) -> Finding:
    """Whether what Tidegate requires is installed; ``version`` of those ``shown`` is in the answer."""
    wrong = []
    for wanted in map(Requirement, requirements):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        have = version(wanted.name)
        if have is None or not wanted.specifier.contains(have, prereleases=True):
            wrong.append(
                f"{wanted.name} {have or 'is missing'} (expected {wanted.specifier or 'any version'})"
            )
    if wrong:
        return error("packages", ", ".join(wrong), "install again: scripts/install")
    known = ((name, version(name)) for name in shown)
    return ok("packages", ", ".join(f"{name} {have}" for name, have in known if have))


def engine(vllm: str, *, wanted: bool, on_cpu: bool, cpu_flags: frozenset[str]) -> Finding:
    """The inference engine, if the deployment needs it; the CPU build needs AVX2."""
    check = "vLLM"
    if not vllm:
        if not wanted:
            return not_applicable(check, "not installed, and no model needs it on this machine")
        return error(check, "not installed, and the deployment needs it", "scripts/install (docs/install.md)")
    if wanted and on_cpu and "avx2" not in cpu_flags:
        return error(check, f"{vllm}, but this CPU has no AVX2", "use another machine")
    return ok(check, vllm)


def memory(available: int, needs: Mapping[str, float], unknown: Sequence[str]) -> Finding:
    """Host memory for the first engines, and for the weights of sleeping ones, which are pinned there."""
    total = sum(needs.values())
    found = f"{available / _GIB:.1f} GiB available"
    if needs:
        found += f", {total / _GIB:.1f} GiB needed: {', '.join(needs)}"
    if unknown:
        found += f"; not counted, as the weights are not here yet: {', '.join(unknown)}"
    if total > available:
        return error("memory", found, "stop other programs, or use smaller models or fewer replicas")
    return ok("memory", found)


def shared_memory(total: int, free: int, *, ray_bytes: int, gpus_per_replica: int) -> Finding:
    """``/dev/shm``: Ray's object store (``ray_bytes``, 0 without Ray), and engines of several GPUs."""
    check = "/dev/shm"  # noqa: S108 - only its name
    found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    advice = "docker run --shm-size 2g, or mount a larger tmpfs"
    if free < ray_bytes:
        return error(check, f"{found}; Ray needs {ray_bytes / _GIB:.2f} GiB", advice)
    if gpus_per_replica > 1 and free < _SHARED_BYTES:
        return warning(check, f"{found}; the processes of a replica with several GPUs share it", advice)
    return ok(check, found)


def disk(free: Mapping[str, int]) -> Finding:
    """The free space by the path of each directory; full disks lose logs, decisions and adapters."""
    found = ", ".join(f"{path}: {size / _GIB:.1f} GiB free" for path, size in free.items())
    least = min(free.values())
    if least < _NO_DISK_BYTES:
        return error("disk", found, "free at least 1 GiB there; models need more")
    if least < _LOW_DISK_BYTES:
        return warning("disk", found, "models that are not here yet may not fit")
    return ok("disk", found)


def descriptors(hard: int) -> Finding:
    """The hard limit of open files, to which each process raises its own."""
    check = "open files"
    if hard >= MAX_DESCRIPTORS:
        return ok(check, f"up to {MAX_DESCRIPTORS:,} per process")
    clients = max(1, (hard - SPARE_DESCRIPTORS) // 2)
    found = f"at most {hard:,} per process: {clients:,} client connections per gateway worker"
    advice = f"raise the hard limit to {MAX_DESCRIPTORS} (LimitNOFILE of systemd, docker run --ulimit nofile)"
    return (error if hard < _FEW_DESCRIPTORS else warning)(check, found, advice)


def compiled(problem: str) -> Finding:
    """Whether the request path runs as machine code; ``problem`` is why not."""
    if not problem:
        return ok("request path", "compiled")
    return warning(
        "request path",
        f"not compiled: {problem}; a small request costs nearly twice the CPU time",
        "install Tidegate again, with a C compiler (scripts/install in a checkout)",
    )


def free_disk(paths: Iterable[Path]) -> dict[str, int]:
    """The free bytes at each path, or at its nearest parent that exists; one path of each file system."""
    found: dict[int, tuple[str, int]] = {}
    for path in paths:
        there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        state = os.statvfs(there)
        found.setdefault(there.stat().st_dev, (str(path), state.f_bavail * state.f_frsize))
    return dict(found.values())
