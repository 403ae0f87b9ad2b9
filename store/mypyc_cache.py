"""The modules of the request path compiled by mypyc, stored by the digest of their sources.

``python -m store.mypyc_cache`` builds them; without a build a gateway worker runs the sources. The
digest covers sources, interpreter and compiler, so an edited source is never shadowed by an old build.
"""

from __future__ import annotations

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
from store.state_dir import locked

# The modules of the request path. Structures of msgspec and ctypes are created at run time, uncompiled.
MODULES = {
    "policy": (
        "admission/affinity_dispatch",
        "admission/dispatcher",
        "admission/fairness",
        "admission/ordered_set",
        "admission/queue",
        "admission/replica_pool_interface",
        "admission/retry",
        "admission/slot_sharing",
        "admission/suspects",
        "admission/virtual_counters",
        "admission/wait_prediction",
        "engine/prefill_estimate",
        "hashing",
        "request",
        "routing/cache_affinity",
        "routing/concurrency_limit",
        "routing/cost",
        "routing/replica_health",
        "routing/prediction_correction",
        "routing/prefix_index",
        "routing/replica_state",
        "routing/resident_sessions",
        "routing/router",
        "routing/session_return",
        "routing/settings",
        "signals/worker_counters",
        "stats/histogram",
        "stats/windows",
        "tenancy/price",
        "tenancy/token_bucket",
        "tenancy/token_count",
        "wire/frames",
    ),
    "gateway": (
        "request_pipeline",
        "request_context",
        "delivery/retry_loop",
        "delivery/spillover",
        "delivery/suspects",
        "delivery/relay",
        "delivery/replica_idle_timeouts",
        "delivery/sse_keepalive",
        "http/acceptor",
        "http/byte_accumulator",
        "http/client",
        "http/forwarded",
        "http/connection",
        "http/multiplexed_client",
        "http/tcp_info",
        "http/asgi_exchange",
        "http/read_turns",
        "http/server",
        "http/upload_budget",
        "intake/access_checks",
        "intake/adapter_catalog",
        "intake/principal",
        "intake/limit_headers",
        "intake/limit_state",
        "intake/rate_limiter",
        "intake/request_resolver",
        "intake/shared_limits",
        "intake/tenants",
        "intake/usage_journal",
        "protocol/batched_body",
        "protocol/body",
        "protocol/client_session",
        "protocol/errors",
        "protocol/features",
        "protocol/prompt_features",
        "protocol/rendered_prompt",
        "protocol/json_splice",
        "protocol/json_structure",
        "protocol/model_rewrite",
        "protocol/paths",
        "protocol/sse_validator",
        "protocol/usage",
        "protocol/validation/bounds",
        "protocol/validation/media",
        "protocol/validation/regex_size",
        "queue/model_queues",
        "queue/replica_pool",
        "queue/dispatcher_driver",
        "routing/fleet",
        "routing/loaded_adapters",
        "routing/mapped_rows",
        "routing/replica_handle",
        "routing/model_routers",
        "routing/shared_counters",
        "telemetry/adapter_metrics",
        "telemetry/gen_ai_metrics",
        "telemetry/latency_parts",
        "telemetry/metrics",
        "telemetry/metric_families",
        "telemetry/traces/request_trace",
        "telemetry/tenant_metrics",
    ),
}
# Packages that only the type checker reads.
_READ = ("store",)
ROOT = Path(policy.__file__).parents[1]


def home() -> Path:
    """The directory of builds, in the environment of this interpreter."""
    return Path(sys.prefix) / "share" / "tidegate" / "compiled"


def use() -> bool:
    """Make later imports use the compiled modules, if they were built; returns whether they were."""
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
    """Sixteen hex digits of everything that the machine code depends on."""
    whole = hashlib.sha256(f"{sys.version}\0{platform.machine()}\0{_compiler()}\0".encode())
    for package in (*MODULES, *_READ):
        for path in sorted((ROOT / package).rglob("*.py")):
            whole.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def build() -> Path:
    """Compile unless there is a build; raises :class:`policy.errors.PreconditionFailed` if that fails."""
    final = home() / digest()
    final.parent.mkdir(parents=True, exist_ok=True)
    with locked(final.parent / ".lock"):
        if final.is_dir():  # built by the last holder of the lock
            return final
        work = final.parent / ".work"
        # Left by a run that was killed; the lock excludes others.
        shutil.rmtree(work, ignore_errors=True)
        try:
            for package in (*MODULES, *_READ):
                shutil.copytree(ROOT / package, work / package, ignore=shutil.ignore_patterns("__pycache__"))
            _compile(work)
            # A package is imported from one folder, where machine code goes before its source.
            for package in _READ:
                shutil.rmtree(work / package)
            for former in final.parent.iterdir():  # of other sources; processes have them in memory
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
    """Build with a message; on failure the sources still run."""
    try:
        if not (home() / digest()).is_dir():
            print("compiling the gateway, two minutes or so", flush=True)  # noqa: T201 - progress of the installer
        build()
    except (PreconditionFailed, OSError) as error:
        sys.exit(f"the gateway will run its sources uncompiled, slower: {error}")


if __name__ == "__main__":
    main()
