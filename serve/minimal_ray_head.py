"""A Ray head in the foreground with only what Tidegate uses: ``python -m serve.minimal_ray_head``.

Against ``ray start --head --block``, which ends the node with any of its processes:

- No log monitor, client server, autoscaler, metrics agent, or module of the dashboard but Serve's.
- The dashboard process, which serves the REST API of Serve, is restarted, and so is the runtime environment
  agent. With Redis, the GCS is restarted too.
- A dead raylet, or GCS without Redis, ends the head; the supervisor starts another.

Source of the processes and their order: ``ray._private.node``, Ray 2.60.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.resource_isolation_config import ResourceIsolationConfig
from ray._raylet import (  # type: ignore[attr-defined]  # compiled, with a stub that lacks them
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    persist_port,
)

from policy.stats.backoff import Backoff, failures_after
from serve import raylet_agent_watchdog
from store.state_dir import listen

POLL_S = 0.2
BACKOFF = Backoff(0.5, 10.0)
STABLE_S = 30.0

# The raylet requires a dashboard agent and ends with it. This one has no services: it waits until the raylet
# is gone, which closes its input.
_NO_AGENT = ["sh", "-c", "exec cat", "agent"]
_KEPT = [sys.executable, "-S", "-E", raylet_agent_watchdog.__file__]


class RayHead(Node):  # type: ignore[misc]  # Ray's class is not typed
    """A head node whose processes are watched by :meth:`run`."""

    def start_raylet(self, *args: Any, **kwargs: Any) -> None:
        for name in (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME):
            # As a dashboard agent without these services writes it.
            persist_port(self.get_session_dir_path(), self.node_id, name, -1)
        super().start_raylet(*args, **kwargs)

    def run(self, *, redis: bool) -> str:
        """Watch the processes and restart those that may be; returns which other one ended."""
        restarted = {ray_constants.PROCESS_TYPE_DASHBOARD: _Restarts(self._restart_dashboard)}
        if redis:
            restarted[ray_constants.PROCESS_TYPE_GCS_SERVER] = _Restarts(self._restart_gcs)
        while True:
            time.sleep(POLL_S)
            for kind, process in self.dead_processes():
                if kind not in restarted:
                    return f"{kind} ended with status {process.returncode}"
            for kind, restarts in restarted.items():
                if kind not in dict(self.live_processes()):
                    restarts.step(time.monotonic())

    def _restart_dashboard(self) -> None:
        self.kill_dashboard(check_alive=False)
        self.start_api_server(include_dashboard=True, raise_on_failure=False)

    def _restart_gcs(self) -> None:
        self.kill_gcs_server(check_alive=False)
        self.start_gcs_server()


class _Restarts:
    """When a process that ended is started again."""

    def __init__(self, start: Callable[[], None]) -> None:
        self._start = start
        self._failures = 0
        self._started_at = -math.inf
        self._due: float | None = None

    def step(self, now: float) -> None:
        """Start it once its back-off has passed; called while it does not run."""
        if self._due is None:
            self._failures = failures_after(self._failures, now - self._started_at, STABLE_S)
            self._due = now + BACKOFF.delay_s(self._failures)
        elif now >= self._due:
            self._start()
            self._started_at, self._due = now, None


def _with_less(command: list[str], process_type: str, **kwargs: Any) -> Any:
    """Start a process of Ray's with its command line changed: Ray has no options for these."""
    if process_type == ray_constants.PROCESS_TYPE_DASHBOARD:
        command = [*command, "--modules-to-load=ServeHead"]
    elif process_type == ray_constants.PROCESS_TYPE_RAYLET:
        command = [_agent(word) for word in command]
    return _start_ray_process(command, process_type, **kwargs)


def _agent(word: str) -> str:
    flag, _, agent = word.partition("=")
    if flag == "--dashboard_agent_command":
        return f"{flag}={subprocess.list2cmdline(_NO_AGENT)}"
    if flag == "--runtime_env_agent_command":
        return f"{flag}={subprocess.list2cmdline(_KEPT)} {agent}"
    return word


_start_ray_process = services.start_ray_process


def _free_port(host: str) -> int:
    with listen(host, 0) as sock:
        return int(sock.getsockname()[1])


def main() -> None:
    """Run until SIGTERM, or until a process ends that cannot be restarted (exit status 1)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node-ip", required=True)
    parser.add_argument("--gcs-port", type=int, required=True)
    parser.add_argument("--dashboard-port", type=int, required=True)
    parser.add_argument("--worker-ports", type=int, nargs=2, required=True)
    parser.add_argument("--object-store-memory", type=int, required=True)
    parser.add_argument("--temp-dir", type=Path, required=True)
    parser.add_argument("--num-cpus", type=int)
    parser.add_argument("--num-gpus", type=int)
    parser.add_argument("--redis-address")
    given = parser.parse_args()
    first, last = given.worker_ports
    # As clients do: Ray never uses the loopback address of a machine that has another.
    address = services.resolve_ip_for_localhost(given.node_ip)
    services.start_ray_process = _with_less
    ensure_token_if_auth_enabled(None, create_token_if_missing=False)
    params = RayParams(
        node_ip_address=address, node_name=address, gcs_server_port=given.gcs_port,
        min_worker_port=first, max_worker_port=last, dashboard_host="127.0.0.1",
        dashboard_port=given.dashboard_port, num_cpus=given.num_cpus, num_gpus=given.num_gpus,
        # Fixed, so that the agent can be restarted.
        runtime_env_agent_port=_free_port(address),
        object_store_memory=given.object_store_memory, temp_dir=str(given.temp_dir),
        include_dashboard=True, include_log_monitor=False, no_monitor=True, resources={}, labels={},
        resource_isolation_config=ResourceIsolationConfig(enable_resource_isolation=False),
        # Ray's name for the address of the GCS's Redis.
        external_addresses=[given.redis_address] * 2 if given.redis_address else None,
        redis_username=os.environ.get("REDIS_USERNAME", ray_constants.REDIS_DEFAULT_USERNAME),
        redis_password=os.environ.get("REDIS_PASSWORD", ray_constants.REDIS_DEFAULT_PASSWORD),
    )  # fmt: skip
    ended = RayHead(params, head=True).run(redis=given.redis_address is not None)
    sys.exit(f"the Ray head ends: {ended}")


if __name__ == "__main__":
    main()
