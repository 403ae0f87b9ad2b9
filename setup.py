"""Compile the request path to machine code when Tidegate is built or installed (docs/adr/0010).

It goes into a folder of its own, in a wheel too (:mod:`store.compiled_modules`). Without a C compiler
Tidegate is installed without machine code.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from store import compiled_modules  # noqa: E402 - of this checkout

# The modules of the request path. Structures of msgspec and ctypes are created at run time, uncompiled.
MODULES = {
    "policy": (
        "admission/affinity_dispatch",
        "admission/dispatcher",
        "admission/equivalence_classes",
        "admission/fairness",
        "admission/indexed_heap",
        "admission/queue",
        "admission/replica_pool_interface",
        "admission/retry_policy",
        "admission/crash_suspects",
        "admission/virtual_counters",
        "admission/wait_prediction",
        "admission/worker_slot_sharing",
        "engine/prefill_estimate",
        "hashing",
        "request",
        "routing/cache_affinity",
        "routing/concurrency_limit",
        "routing/cost",
        "routing/replica_health",
        "routing/prediction_correction",
        "routing/cached_prefixes",
        "routing/replica_state",
        "routing/resident_sessions",
        "routing/router",
        "routing/session_return",
        "routing/settings",
        "signals/gateway_worker_counters",
        "stats/histogram",
        "stats/windows",
        "tenancy/price",
        "tenancy/token_bucket",
        "tenancy/token_count",
        "wire/frames",
    ),
    "serve": (
        "engine/fast_path/event_templates",
        "engine/fast_path/stream",
        "engine/frame_server",
        "engine/response_guard",
    ),
    "gateway": (
        "request_pipeline",
        "request_context",
        "delivery/retry_loop",
        "delivery/spillover",
        "delivery/crash_suspects",
        "delivery/relay",
        "delivery/replica_idle_timeouts",
        "delivery/sse_keepalive",
        "http/acceptor",
        "http/byte_accumulator",
        "http/http1_client",
        "http/forwarded",
        "http/server_connection",
        "http/frame_client",
        "http/tcp_info",
        "http/asgi_exchange",
        "http/read_turns",
        "http/server",
        "http/upload_budget",
        "intake/key_restrictions",
        "intake/adapter_catalog",
        "intake/principal",
        "intake/limit_headers",
        "intake/limit_state",
        "intake/rate_limiter",
        "intake/request_resolver",
        "intake/shared_limits",
        "intake/authentication",
        "intake/usage_journal",
        "protocol/body",
        "protocol/body_batching",
        "protocol/client_session",
        "protocol/errors",
        "protocol/restricted_features",
        "protocol/prompt_features",
        "protocol/canonical_prompt",
        "protocol/json_splice",
        "protocol/json_structure",
        "protocol/response_model_name",
        "protocol/paths",
        "protocol/sse_validator",
        "protocol/usage",
        "protocol/validation/engine_work_limits",
        "protocol/validation/media",
        "protocol/validation/regex_size",
        "queue/admission",
        "queue/replica_pool",
        "queue/model_queue",
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
        "telemetry/queue_metrics",
        "telemetry/traces/request_trace",
        "telemetry/traces/tracer",
        "telemetry/tenant_metrics",
    ),
}

SOURCES = [f"{package}/{name}.py" for package, names in MODULES.items() for name in names]
C_SOURCES = Path("build", "machine-code", "c")
# The level that the benchmarks ran at. Functions of other files of the library are called directly if hidden.
OPTIMIZATION, FLAGS = "2", ["-fvisibility=hidden"]
OBJECTS = C_SOURCES.with_name("-".join((sys.implementation.cache_tag, f"O{OPTIMIZATION}", *FLAGS)))


class BuildMachineCode(build_ext):
    """Generate C with mypyc and compile it, one file of C for each module, on all cores."""

    def finalize_options(self) -> None:
        """Decide where it is built: never beside the sources, which all processes would import it for."""
        super().finalize_options()
        self.inplace = False
        self.build_temp = str(OBJECTS)
        self.parallel = _cores()
        in_wheel = Path(self.build_lib, compiled_modules.IN_WHEEL)
        self.build_lib = str(compiled_modules.FOLDER if self.editable_mode else in_wheel)

    def run(self) -> None:
        """Build, or leave out what cannot be built; a wheel fails if there is a compiler."""
        problem = missing_tool()
        built = Path(self.build_lib)
        shutil.rmtree(built, ignore_errors=True)
        self.distribution.ext_modules = self.extensions = []
        digest = compiled_modules.digest()
        if not problem:
            try:
                self._build()
            except (BaseError, SystemExit) as error:
                if not self.editable_mode:
                    raise
                problem = f"mypyc or the C compiler failed ({error}); pip install -v -e . shows how"
        if problem:
            self.announce(f"no machine code: {problem}", level=logging.WARNING)
        compiled_modules.record(built, digest, problem)

    def _build(self) -> None:
        from mypyc.build import mypycify  # noqa: PLC0415 - metadata is asked for without building

        # The sources are checked by scripts/check, with the types of all that they import.
        options = ["--config-file=", "--explicit-package-bases", "--ignore-missing-imports"]
        self.distribution.ext_modules = mypycify(
            [*options, *SOURCES],
            opt_level=OPTIMIZATION,
            debug_level="0",
            multi_file=True,
            target_dir=str(C_SOURCES),
        )
        for extension in self.distribution.ext_modules:
            extension.extra_compile_args += FLAGS
        editable = self.editable_mode
        self.initialize_options()
        self.editable_mode = editable
        self.finalize_options()
        super().run()

    def build_extensions(self) -> None:
        self.compiler.compile = partial(compile_in_parallel, self.compiler)
        super().build_extensions()


def compile_in_parallel(  # noqa: PLR0917 - the signature is distutils'
    compiler: Any,
    sources: list[str],
    output_dir: str | None = None,
    macros: Any = None,
    include_dirs: list[str] | None = None,
    debug: bool = False,
    extra_preargs: list[str] | None = None,
    extra_postargs: list[str] | None = None,
    depends: list[str] | None = None,
) -> list[str]:
    """``CCompiler.compile`` on all cores, for the objects that are older than what they are made of."""
    _, objects, extra, options, build = compiler._setup_compile(
        output_dir, macros, include_dirs, sources, depends, extra_postargs
    )
    arguments = [*compiler._get_cc_args(options, debug, extra_preargs), "-MMD"]

    def compile_one(made: str) -> None:
        if not is_current(Path(made)):
            compiler._compile(made, *build[made], arguments, extra, options)

    # The largest first, so that none is left for the end.
    largest_first = sorted(objects, key=lambda made: -Path(build[made][0]).stat().st_size)
    with ThreadPoolExecutor(_cores()) as pool:
        list(pool.map(compile_one, largest_first))
    return list(objects)


def is_current(made: Path) -> bool:
    """Whether an object is newer than the files that its compiler read, as it listed them."""
    try:
        rule = made.with_suffix(".d").read_text().replace("\\\n", " ")
        read = [Path(name) for name in rule.partition(":")[2].split()]
        return max(path.stat().st_mtime for path in read) < made.stat().st_mtime
    except OSError:
        return False


def missing_tool() -> str:
    """What is missing to compile, empty if nothing is."""
    from distutils.ccompiler import new_compiler  # noqa: PLC0415 - setuptools' own, once it is imported
    from distutils.sysconfig import customize_compiler  # noqa: PLC0415

    try:
        import mypyc.build  # noqa: F401, PLC0415
    except ImportError:
        return "mypy is not installed"
    compiler = new_compiler()
    customize_compiler(compiler)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "includes.c")
        source.write_text("#include <Python.h>\n")
        try:
            compiler.compile([str(source)], folder, include_dirs=[sysconfig.get_path("include")])
        except (BaseError, CompileError) as error:
            return f"no C compiler, or no headers of Python ({error})"
    return ""


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    setup(
        # They say that there will be machine code; mypyc makes the real ones when that is built.
        ext_modules=[Extension(source[:-3].replace("/", "."), [source]) for source in SOURCES],
        cmdclass={"build_ext": BuildMachineCode},
    )
