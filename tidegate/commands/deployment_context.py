"""The deployment of a state directory, and a client of its controller."""

from __future__ import annotations

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.errors import TargetError, Unreachable
from serve.controller.client import ControllerClient
from store.state_dir import StateDir


def stored_deployment(state: StateDir) -> Deployment:
    """The deployment that was applied last; raises :class:`policy.errors.Unreachable` if there is none."""
    raw = state.load(state.deployment_path, dict[str, object])
    if raw is None:
        raise Unreachable(f"nothing was ever started on {state.root}")
    return parse(raw)


def controller_client(state: StateDir) -> ControllerClient:
    """A client of the deployment's controller; raises :class:`policy.errors.TidegateError` without one."""
    deployment = stored_deployment(state)
    if not deployment.needs_controller:
        raise TargetError("every model is external: Tidegate deploys no replicas here")
    return ControllerClient(deployment.cluster.controller, state.secret())
