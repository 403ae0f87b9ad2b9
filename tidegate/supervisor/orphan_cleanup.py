"""Clean up after a killed supervisor: its recorded processes, and its applications on a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from policy.deployment_file.parse import parse
from policy.errors import EngineFailed, Unreachable
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tidegate.supervisor import command_lines
from tidegate.supervisor.children import ToolLine, run_tool
from tidegate.supervisor.process_record import ProcessRecord

# What a killed supervisor of an elected controller leaves, beside replicas that may have another leader.
ELECTED = frozenset({"supervisor", command_lines.LOCAL_CONTROLLER})
# Time to join the cluster, without the drain time of the replicas.
CLUSTER_STOP_S = 60.0
# How long a controller may take to answer.
ANSWER_S = 2.0


def remove_orphans(state: StateDir, report: Callable[[str], None]) -> bool:
    """End the recorded processes and nothing else; returns whether there was anything to clean up.

    Raises :class:`policy.errors.Unreachable` for processes that do not exit and
    :class:`policy.errors.EngineFailed` for a failed cleanup of a cluster; the next `down` can repeat it.
    """
    record = ProcessRecord(state)
    if not record.entries:
        return False
    raw = state.load(state.deployment_path, dict[str, Any]) or {}
    led = _is_led(state, record, raw)
    living = tuple(entry for entry in record.living() if not led or entry.name in ELECTED)
    if left := record.end(living, lambda entry: report(f"ended {entry}")):
        raise Unreachable(f"these processes do not exit: {', '.join(map(str, left))}")
    joined = _clean_up_cluster(state, record, raw, report)
    if led:
        record.keep(record.living())
        return bool(living)
    record.clear()
    forget_targets(state)
    return bool(living) or joined


def forget_targets(state: StateDir) -> None:
    """Delete what the controller keeps: after an orderly stop the next start follows the deployment file."""
    for path in (
        *(state.targets_path, state.hosts_path, state.controller_run_path),
        *(state.gpu_groups_path, state.old_gpu_groups_path),
    ):
        path.unlink(missing_ok=True)


async def leave_cluster(state: StateDir, record: ProcessRecord, drain_s: float) -> tuple[int, ToolLine]:
    """Delete our applications and our actor on a cluster that we joined, which outlives our processes.

    Returns the exit status and the last line of the tool; raises :class:`TimeoutError`.
    """
    async with asyncio.timeout(CLUSTER_STOP_S + drain_s):
        return await run_tool(command_lines.cluster(state, "stop"), state, record)


def _is_led(state: StateDir, record: ProcessRecord, raw: dict[str, Any]) -> bool:
    """Whether replicas that are recorded here have one of several controllers that answers."""
    addresses = raw.get("cluster", {}).get("controller", "")
    serves = any(entry.name.startswith("gateway-") for entry in record.entries.values())
    if "," not in addresses or serves:
        return False
    with contextlib.closing(ControllerClient(addresses, state.secret(), timeout_s=ANSWER_S)) as client:
        return any(client.leaders().values())


def _clean_up_cluster(
    state: StateDir, record: ProcessRecord, raw: dict[str, Any], report: Callable[[str], None]
) -> bool:
    # A local controller was a child process, and its replicas were recorded.
    local = any(entry.name == command_lines.LOCAL_CONTROLLER for entry in record.entries.values())
    # Before parsing: `down` works with a deployment file of another version.
    if local or raw.get("cluster", {}).get("address", "local") == "local":
        return False
    deployment = parse(raw)
    if not deployment.deploys:
        return False
    report(f"deleting what is left on the Ray cluster at {deployment.cluster.address}")
    drain_s = max(spec.control.mode.drain_timeout_s for spec in deployment.models)
    log = state.logs / "cluster.log"
    try:
        code, last = asyncio.run(leave_cluster(state, record, drain_s))
    except TimeoutError:
        raise EngineFailed(f"replicas are still draining; run `tidegate down` again, or see {log}") from None
    if code:
        why = last.error or f"exit status {code}"
        raise EngineFailed(f"cannot clean up the cluster: {why}; see {log}")
    return True
