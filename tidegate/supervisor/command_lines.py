"""The command lines of the processes that the supervisor starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from policy.config.deployment import Deployment
from serve.ray_launcher import head_command
from store.state_dir import StateDir
from tidegate.supervisor.children import ProcessSpec

# Not inherited by engines: their metrics would go to the gateway's files.
_METRICS = "PROMETHEUS_MULTIPROC_DIR"
LOCAL_CONTROLLER = "controller"


def _environment(**more: str) -> Mapping[str, str]:
    base = {key: value for key, value in os.environ.items() if key != _METRICS}
    return {**base, "PYTHONUNBUFFERED": "1", **more}


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def gateway_worker(state: StateDir, worker: int, fd: int, admin_fd: int) -> ProcessSpec:
    """One gateway worker on the two inherited sockets."""
    return ProcessSpec(
        name=f"gateway-{worker}",
        argv=_python(
            "gateway.worker_main",
            *("--state", str(state.root), "--fd", str(fd)),
            *("--admin-fd", str(admin_fd), "--worker", str(worker)),
        ),
        env=_environment(**{_METRICS: str(state.metrics_dir)}),
        fds=(fd, admin_fd),
    )


def accounting(state: StateDir) -> ProcessSpec:
    """The process for keys, limits, the ledger and the audit trail."""
    return ProcessSpec(
        name="accounting",
        argv=_python("gateway.accounting.main", "--state", str(state.root)),
        env=_environment(**{_METRICS: str(state.metrics_dir)}),
    )


def local_controller(state: StateDir) -> ProcessSpec:
    """The controller and its replicas without Ray."""
    return ProcessSpec(
        name=LOCAL_CONTROLLER,
        argv=_python("serve.controller.process", "--state", str(state.root)),
        env=_environment(),
    )


def elected_controller(state: StateDir, address: str, listen: str, *, ray: bool) -> ProcessSpec:
    """One of several controllers, which elect their leader."""
    options = ("--address", address, "--listen", listen, *(("--ray",) if ray else ()))
    return ProcessSpec(
        name=LOCAL_CONTROLLER,
        argv=_python("serve.elected_controller", "--state", str(state.root), *options),
        env=_environment(),
    )


def ray_head(deployment: Deployment, state: StateDir) -> ProcessSpec:
    """A Ray head of this deployment, in the foreground."""
    argv, env = head_command(deployment, state)
    return ProcessSpec(name="ray", argv=tuple(argv), env=_environment(**env))


def cluster(state: StateDir, verb: str) -> ProcessSpec:
    """``start`` makes sure that the controller actor exists, ``restart`` kills one that hangs.

    ``stop`` deletes our applications.
    """
    return ProcessSpec(
        name="cluster",
        argv=_python("serve.ray_launcher", verb, "--state", str(state.root)),
        env=_environment(),
    )


def prepare_model(state: StateDir, model: str) -> ProcessSpec:
    """Fetch, convert and verify a model's weights."""
    return ProcessSpec(
        name="models",
        argv=_python(
            *("store.model_weights.prepare", "prepare"),
            *("--deployment-json", str(state.deployment_path), "--model", model),
        ),
        env=_environment(),
    )
