"""The Ray cluster: the head that the supervisor runs, and ``start`` and ``stop`` of a deployment on it.

``python -m serve.ray_launcher start --state DIR`` starts the controller, or hands the deployment on disk to
the running one; ``restart`` kills a controller that hangs, and Ray starts it again; ``stop`` deletes this
deployment's applications and actor, and nothing else on the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from policy.config.deployment import Deployment
from policy.config.port_conflicts import RAY_WORKERS, is_loopback
from policy.deployment_file.parse import parse
from policy.errors import TidegateError, Unreachable
from serve.actuator.interface import Actuator
from serve.actuator.placement_feasibility import check_placeable, node_sizes
from serve.actuator.serve_application_status import SERVE_ENVIRONMENT
from serve.controller.client import ControllerClient
from store.state_dir import StateDir, own_directory, write_atomic

# Tidegate passes no objects through Ray; its store only holds Ray's own few.
OBJECT_STORE_BYTES = 128 * 1024 * 1024
# Ray's timers, for replicas that live for hours. With its own, idle processes take 7.4 % of a core; with
# these 4.6 %. Each wake-up delays a step of an engine on the same CPUs.
_TIMERS = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_raylet_report_resources_period_milliseconds": "500",
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    # Records of tasks and of event loops, for Ray's own dashboard.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
}
# How long a controller that exists may take to answer.
ANSWER_S = 30.0


def token_path(state: StateDir) -> Path:
    """The file with the token of a local head."""
    return state.root / "ray_token"


def environment(deployment: Deployment, state: StateDir) -> dict[str, str]:
    """The environment of every client of the cluster; token authentication is always on."""
    env = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
    if deployment.cluster.address == "local":
        path = token_path(state)
        if not path.exists():
            state.ensure()
            write_atomic(path, secrets.token_hex(32).encode(), mode=0o600)
        env["RAY_AUTH_TOKEN_PATH"] = str(path)
        if is_loopback(deployment.cluster.node_ip):
            # Ray's switch by which its processes use the loopback address of a machine that has another.
            env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return env


def temp_dir(state: StateDir) -> Path:
    """Ray's directory for this deployment; short, because Ray puts Unix sockets below it."""
    digest = hashlib.sha256(os.fsencode(state.root)).hexdigest()[:8]
    return own_directory(Path(tempfile.gettempdir()) / f"tidegate-ray-{os.getuid()}-{digest}")


def head_command(deployment: Deployment, state: StateDir) -> tuple[list[str], dict[str, str]]:
    """The command of a Ray head in the foreground, and the additions to its environment.

    With a ``node_ip`` of loopback all of Ray listens there. Otherwise its GCS, raylet and workers listen on
    every interface; the token protects them.
    """
    cluster = deployment.cluster
    argv = [
        sys.executable, "-m", "serve.minimal_ray_head", "--node-ip", cluster.node_ip,
        "--gcs-port", str(cluster.gcs_port), "--dashboard-port", str(cluster.dashboard_port),
        "--worker-ports", *map(str, RAY_WORKERS), "--object-store-memory", str(OBJECT_STORE_BYTES),
        "--temp-dir", str(temp_dir(state)),
    ]  # fmt: skip
    if cluster.simulated_gpus is not None:
        argv += ["--num-gpus", str(cluster.simulated_gpus)]
    if cluster.redis_address is not None:
        argv += ["--redis-address", cluster.redis_address]
    return argv, environment(deployment, state) | SERVE_ENVIRONMENT | _TIMERS | {
        # The supervisor deletes all applications before it ends the head, so nothing is left to drain.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Ray runs its workers, and with them each engine, at niceness 15: beside any other process
        # that computes one would get 3 % of a core.
        "RAY_worker_niceness": "0",
        # Several deployments can share a Redis.
        "RAY_external_storage_namespace": temp_dir(state).name,
    }


def address(deployment: Deployment) -> str:
    """The address that clients join: the local head, or the cluster of the deployment."""
    cluster = deployment.cluster
    return f"{cluster.node_ip}:{cluster.gcs_port}" if cluster.address == "local" else cluster.address


def _print(**fields: str) -> None:
    print(msgspec.json.encode(fields).decode(), flush=True)  # noqa: T201


def join(deployment: Deployment, state: StateDir) -> tuple[str, str]:
    """Join the cluster from this process; returns the dashboard's address and the token.

    Raises :class:`policy.errors.Unreachable` when it cannot be joined or has no dashboard.
    """
    os.environ.update(environment(deployment, state))
    import ray  # noqa: PLC0415  # the token must be in the environment before Ray is loaded

    try:
        context = ray.init(address=address(deployment), namespace="tidegate", log_to_driver=False)
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        raise Unreachable(f"Ray at {address(deployment)} cannot be joined: {error}") from error
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    token = os.environ.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.exists() else "")
    if deployment.cluster.address == "local":
        # The head reports its dashboard only once that is up; the controller need not wait for it.
        return f"127.0.0.1:{deployment.cluster.dashboard_port}", token
    if not context.dashboard_url:
        raise Unreachable(f"Ray at {address(deployment)} has no dashboard, which carries Serve's scale API")
    return context.dashboard_url, token


def start(deployment: Deployment, state: StateDir) -> None:
    """Start the controller actor, or hand the deployment on disk to the running one."""
    _print(step="ray", message=f"joining {address(deployment)}")
    dashboard, token = join(deployment, state)
    check_placeable(deployment, node_sizes())
    from serve.controller import ray_actor as ray_controller  # noqa: PLC0415  # imports Ray

    _print(step="controller", message=f"starting at {deployment.cluster.controller}")
    pid, existed = ray_controller.ensure(state, deployment.cluster, dashboard, token)
    if existed:
        # It outlived its supervisor and has an older deployment.
        _print(step="controller", message="handing it the document")
        _hand_over(deployment.cluster.controller, state)
    _print(step="controller", message=f"runs as process {pid}")


def _hand_over(address: str, state: StateDir) -> None:
    """Apply the deployment on disk; raises the controller's refusal."""
    document = state.load(state.deployment_path, dict[str, object])
    deadline = time.monotonic() + ANSWER_S
    with contextlib.closing(ControllerClient(address, state.secret(), timeout_s=ANSWER_S)) as client:
        while True:
            try:
                client.apply(document)
                return
            except Unreachable:
                # Ray may just be restarting it.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)


def restart(deployment: Deployment, state: StateDir) -> None:
    """Restart the controller actor."""
    join(deployment, state)
    from serve.controller import ray_actor as ray_controller  # noqa: PLC0415  # imports Ray

    ray_controller.restart(state)


def stop(deployment: Deployment, state: StateDir) -> None:
    """Delete the deployment's actor and applications."""
    dashboard, token = join(deployment, state)
    from serve.actuator.ray import RayActuator  # noqa: PLC0415  # imports Ray
    from serve.controller import ray_actor as ray_controller  # noqa: PLC0415  # imports Ray

    # The actor first: it would deploy deleted applications again.
    ray_controller.remove(state)
    _print(step="ray", message="deleting applications")
    asyncio.run(_end_all(RayActuator(state, deployment.cluster, dashboard, token)))


async def _end_all(actuator: Actuator) -> None:
    await actuator.stop()
    await actuator.close()


def main() -> None:
    """Entry point; prints JSON lines, exits 1 with ``{"error": ...}`` when it fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("start", "restart", "stop"))
    parser.add_argument("--state", type=Path, required=True)
    given = parser.parse_args()
    state = StateDir(given.state)
    try:
        deployment = parse(state.load(state.deployment_path, dict[str, object]))
        {"start": start, "restart": restart, "stop": stop}[given.action](deployment, state)
    except TidegateError as error:
        _print(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
