"""The controller as a named Ray actor, pinned to the head node and restarted by Ray."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import ray
import uvloop
from ray.actor import ActorHandle

from policy.config.deployment import Cluster
from serve.actuator.interface import deployment_id
from serve.actuator.ray import RayActuator
from serve.actuator.serve_application_status import SERVE_ENVIRONMENT
from serve.controller.crash_loop_backoff import record_error, record_start
from serve.controller.serving import serve_controller
from store.json_log_format import FileHandler, log_to
from store.log_file import RotatingLog
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

NAMESPACE = "tidegate"


class ControllerActor:
    """Runs the controller on a thread of its own: Ray runs ``__init__`` again after a crash, at once."""

    def __init__(self, state_dir: str, cluster: Cluster, dashboard: str, token: str) -> None:
        state = StateDir(Path(state_dir))
        actuator = RayActuator(state, cluster, dashboard, token)
        # In the state directory, as without Ray: Ray's own file of this process is elsewhere, by its pid.
        log_to(FileHandler(RotatingLog(state.logs / "controller.log")))
        self._thread = threading.Thread(
            target=self._run, args=(actuator, state, cluster.controller), name="controller", daemon=True
        )
        self._thread.start()

    def _run(self, actuator: RayActuator, state: StateDir, address: str) -> None:
        try:
            time.sleep(record_start(state, time.time()))
            uvloop.run(serve_controller(actuator, state, address))
        except BaseException as error:
            log.exception("the controller failed")
            record_error(state, error)
        finally:
            # A controller that ended is restarted by Ray only if its process ends.
            os._exit(1)

    def ping(self) -> int:
        """The process id, once the actor exists."""
        return os.getpid()


def ensure(state: StateDir, cluster: Cluster, dashboard: str, token: str) -> tuple[int, bool]:
    """Make the actor unless it exists; returns its process id, and whether it existed."""
    existed = _find(state) is not None
    pinned = {"node:__internal_head__": 0.001}
    # Serve's controller is started by this actor and inherits its environment; a local head has it already.
    inherited = None if cluster.address == "local" else {"env_vars": SERVE_ENVIRONMENT}
    actor_class = ray.remote(num_cpus=0, max_restarts=-1, resources=pinned)(ControllerActor)
    actor = actor_class.options(
        name=_name(state), namespace=NAMESPACE, lifetime="detached", get_if_exists=True, runtime_env=inherited
    ).remote(str(state.root), cluster, dashboard, token)
    return int(ray.get(actor.ping.remote())), existed


def restart(state: StateDir) -> None:
    """Kill the actor, which Ray restarts; one that is stopped is killed by its raylet after some seconds."""
    if (actor := _find(state)) is not None:
        ray.kill(actor, no_restart=False)


def remove(state: StateDir) -> None:
    """End the actor for good; one that does not exist is no error."""
    if (actor := _find(state)) is not None:
        ray.kill(actor, no_restart=True)


def _find(state: StateDir) -> ActorHandle | None:
    try:
        return ray.get_actor(_name(state), namespace=NAMESPACE)
    except ValueError:
        return None


def _name(state: StateDir) -> str:
    return f"tidegate-controller-{deployment_id(state)}"
