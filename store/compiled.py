"""What serves a request as machine code: modules that mypyc compiled, found by the digest of their sources.

``python -m store.compiled`` builds what :func:`use` finds; without it a gateway worker runs the sources
themselves. The digest covers the sources, the interpreter and the compiler, so what is found is what is
there, and an edited source is never shadowed by what was compiled of it before.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import policy
from policy.errors import PreconditionFailed

# What runs for every request. Structures of msgspec and of ctypes are made at run time and stay sources.
MODULES = {
    "policy": (
        "admission/dispatch",
        "admission/dispatcher",
        "admission/fairness",
        "admission/ordered_set",
        "admission/queue",
        "admission/replica_pool",
        "admission/retry",
        "admission/virtual_counters",
        "admission/wait_prediction",
        "engine/step_table",
        "hashing",
        "request",
        "routing/affinity",
        "routing/cost",
        "routing/outlier_ejection",
        "routing/prediction_error",
        "routing/prefix_index",
        "routing/replica_state",
        "routing/router",
        "routing/settings",
        "signals/counters",
        "stats/histogram",
        "stats/windows",
    ),
    "gateway": (
        "app",
        "call",
        "delivery/attempts",
        "delivery/overflow",
        "delivery/relay",
        "delivery/timeouts",
        "http/acceptor",
        "http/client",
        "http/connection",
        "http/exchange",
        "http/server",
        "intake/adapter_catalog",
        "intake/resolve",
        "intake/tenants",
        "protocol/batch_body",
        "protocol/body",
        "protocol/errors",
        "protocol/prompt_hash",
        "protocol/splice",
        "protocol/sse",
        "protocol/usage",
        "queue/admission",
        "queue/model_pool",
        "queue/model_queue",
        "queue/rejections",
        "routing/loaded_adapters",
        "routing/replica",
        "routing/router",
        "routing/shared_memory",
        "telemetry/adapter_metrics",
        "telemetry/metrics",
        "telemetry/prometheus",
    ),
}
# Whose types the compiler reads, beside the packages themselves.
_READ = ("store",)
ROOT = Path(policy.__file__).parents[1]


def home() -> Path:
    """Where builds live: in the environment of the interpreter that they are for."""
    return Path(sys.prefix) / "share" / "tidegate" / "compiled"


def use() -> bool:
    """Have this process import the compiled modules, where they were built; before it imports them.

    That is of the packages that it has begun to import: who decides alone needs no gateway.
    """
    build = home() / digest()
    if not build.is_dir():
        return False
    for name in MODULES:
        if name in sys.modules:
            sys.modules[name].__path__.insert(0, str(build / name))
    sys.path.insert(0, str(build))
    importlib.invalidate_caches()
    return True


def digest() -> str:
    """Sixteen hex digits over all that the machine code depends on."""
    whole = hashlib.sha256(f"{sys.version}\0{platform.machine()}\0{_compiler()}\0".encode())
    for package in (*MODULES, *_READ):
        for path in sorted((ROOT / package).rglob("*.py")):
            whole.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def build() -> Path:
    """Compile, unless it was done; raises :class:`policy.errors.PreconditionFailed` when that fails."""
    final = home() / digest()
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():  # whoever held the lock has done the work
            return final
        work = final.parent / ".work"
        # Left by a run that was killed: the lock is ours, so nobody works in it.
        shutil.rmtree(work, ignore_errors=True)
        try:
            for package in (*MODULES, *_READ):
                shutil.copytree(ROOT / package, work / package, ignore=shutil.ignore_patterns("__pycache__"))
            _compile(work)
            # Packages whole: a folder is imported from one place, and machine code goes before its source.
            for package in _READ:
                shutil.rmtree(work / package)
            for former in final.parent.iterdir():  # of other sources; who runs them has them in memory
                if former.is_dir() and former != work:
                    shutil.rmtree(former, ignore_errors=True)
            work.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return final


def _compile(work: Path) -> None:
    """Run mypyc in ``work``, which holds a copy of the sources."""
    names = [f"{package}/{name}.py" for package, modules in MODULES.items() for name in modules]
    ran = subprocess.run(
        [sys.executable, "-m", "mypyc", "--explicit-package-bases", "--ignore-missing-imports", *names],
        cwd=work,
        # The level that the benchmarks ran at.
        env={**os.environ, "MYPYC_OPT_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        last = "\n".join((ran.stdout + ran.stderr).splitlines()[-8:])
        raise PreconditionFailed(f"mypyc cannot compile the gateway (it needs a C compiler):\n{last}")


def _compiler() -> str:
    try:
        return importlib.metadata.version("mypy")
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Build and say so; what cannot be compiled still runs."""
    try:
        if not (home() / digest()).is_dir():
            print("compiling the gateway, two minutes or so", flush=True)  # noqa: T201 - the installer's progress
        build()
    except (PreconditionFailed, OSError) as error:
        sys.exit(f"the gateway will run its sources uncompiled, slower: {error}")


if __name__ == "__main__":
    main()
