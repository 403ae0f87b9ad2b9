"""vLLM's torch profiler: a trace of the operators and kernels of an engine, as one file.

Nothing is recorded, and nothing costs time, until a trace is asked for.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from vllm.config import ProfilerConfig

from policy.errors import EngineFailed, PreconditionFailed

# Steps after which a recording ends by itself: a trace of a small model has 2 MB for 100 steps.
MAX_STEPS = 1000


def prepare(config: Any) -> None:
    """Set up the profiler in vLLM's ``config``, unless the deployment file has a profiler of its own."""
    if config.profiler_config.profiler is None:
        config.profiler_config = ProfilerConfig(
            profiler="torch",
            torch_profiler_dir=str(_folder()),
            # Stacks of Python make a trace ten times as large; py-spy shows them.
            torch_profiler_with_stack=False,
            ignore_frontend=True,
        )


async def record(llm: Any, seconds: float) -> Path:
    """Record the steps of ``seconds`` seconds; returns the trace of the first worker, which is the caller's.

    Raises :class:`policy.errors.PreconditionFailed` if another one is being recorded or the deployment file
    has another profiler, :class:`policy.errors.EngineFailed` if vLLM wrote none.
    """
    profiler = llm.vllm_config.profiler_config
    if profiler.profiler != "torch":
        raise PreconditionFailed(
            f"engine_args.profiler_config sets the profiler {profiler.profiler!r}: torch only"
        )
    folder = Path(profiler.torch_profiler_dir)
    prefix = secrets.token_hex(8)
    try:
        await llm.start_profile(prefix, max_iterations=MAX_STEPS)
    except Exception as error:
        raise PreconditionFailed(f"vLLM's profiler did not start: {error}") from error
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.shield(llm.stop_profile())
    return await asyncio.to_thread(_trace_of, folder, prefix)


def _trace_of(folder: Path, prefix: str) -> Path:
    """The trace of the first worker of a session; all else that it wrote is removed."""
    written = sorted(folder.glob(f"{prefix}*"))
    traces = [path for path in written if ".pt.trace.json" in path.name]
    for path in written:
        if path not in traces[:1]:
            path.unlink()
    if not traces:
        raise EngineFailed("vLLM's profiler wrote no trace: its log has the reason")
    return traces[0]


def _folder() -> Path:
    """Where traces of this user's engines are written, in a directory that only this user can open."""
    folder = Path(tempfile.gettempdir()) / f"tidegate-traces-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EngineFailed(f"{folder} belongs to another user")
    return folder
