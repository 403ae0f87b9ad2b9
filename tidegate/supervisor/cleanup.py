"""What a supervisor that was killed left behind: processes by its record, and all it had on a cluster."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from typing import Any

import msgspec

from policy.document.parse import parse
from policy.errors import EngineFailed, Unreachable
from store.state_dir import StateDir
from tidegate.supervisor import command_lines
from tidegate.supervisor.children import ROOT
from tidegate.supervisor.process_record import ORPHAN_GRACE_S, ProcessRecord, RecordedProcess, end

# Joining takes seconds; what is added is the time that replicas may drain.
CLUSTER_STOP_S = 60.0


def remove_leftovers(state: StateDir, tell: Callable[[str], None]) -> bool:
    """End what was left, and nothing else; returns whether there was anything.

    Raises :class:`policy.errors.Unreachable` for processes that do not end and
    :class:`policy.errors.EngineFailed` for a cluster that cannot be cleaned; the record stays, so that
    it can be tried again.
    """
    ledger = ProcessRecord(state)
    if not ledger.entries:
        return False
    living = ledger.living()
    left = end(
        living, grace_s=ORPHAN_GRACE_S, tell=lambda entry: tell(f"ended {entry.name} (pid {entry.pid})")
    )
    if left:
        raise Unreachable(
            f"these do not end: {', '.join(f'{entry.name} (pid {entry.pid})' for entry in left)}"
        )
    joined = _leave_cluster(state, ledger.entries, tell)
    ledger.clear()
    forget_targets(state)
    return bool(living) or joined


def forget_targets(state: StateDir) -> None:
    """After an orderly stop nothing is wanted and no host lives: the next start is the document's."""
    for path in (state.targets_path, state.root / "hosts.json"):
        path.unlink(missing_ok=True)


def _leave_cluster(
    state: StateDir, entries: tuple[RecordedProcess, ...], tell: Callable[[str], None]
) -> bool:
    """Delete our applications and actor on a cluster that we joined; it outlives every process here."""
    raw = state.load(state.deployment_path, dict[str, Any]) or {}
    # A controller of this machine was a child, and its replicas were recorded.
    local = any(entry.name == command_lines.LOCAL_CONTROLLER for entry in entries)
    # Read before the whole is checked: another version's document keeps nobody from `down`.
    if local or raw.get("cluster", {}).get("address", "local") == "local":
        return False
    deployment = parse(raw)
    if not deployment.needs_controller:
        return False
    tell(f"deleting what is left on the Ray cluster at {deployment.cluster.address}")
    part = command_lines.cluster(state, "stop")
    drain_s = max(spec.control.mode.drain_timeout_s for spec in deployment.models)
    log = state.logs / f"{part.name}.log"
    try:
        with log.open("ab") as file:
            done = subprocess.run(
                part.argv,
                env=dict(part.env),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                timeout=CLUSTER_STOP_S + drain_s,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise EngineFailed(f"replicas still drain; run `tidegate down` again, or see {log}") from None
    if done.returncode:
        raise EngineFailed(f"the cluster keeps what is ours: {_why(done.stdout)}; see {log}")
    return True


def _why(out: bytes) -> str:
    """The error in the tool's last line, else all it said."""
    with contextlib.suppress(IndexError, KeyError, msgspec.MsgspecError):
        return msgspec.json.decode(out.splitlines()[-1], type=dict[str, str])["error"]
    return out.decode(errors="replace").strip()[-500:]
