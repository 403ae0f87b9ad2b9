"""The deployment of a state directory, a client of its controller, and the token of the admin port."""

from __future__ import annotations

import os
from ipaddress import ip_address
from urllib.parse import urlsplit

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.errors import TargetError, Unreachable
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tidegate.supervisor.control_socket import SupervisorClient

# The token of a gateway on another machine, or of another state directory.
TOKEN_VARIABLE = "TIDEGATE_ADMIN_TOKEN"  # noqa: S105 - a name


def stored_deployment(state: StateDir) -> Deployment:
    """The deployment that was applied last; raises :class:`policy.errors.Unreachable` if there is none."""
    raw = state.load(state.deployment_path, dict[str, object])
    if raw is None:
        raise Unreachable(f"Nothing was ever started on {state.root}.")
    return parse(raw)


def controller_client(state: StateDir) -> ControllerClient:
    """A client of the running deployment's controller, which outlives the supervisor on a joined cluster.

    Raises :class:`policy.errors.Unreachable` if nothing is running, :class:`policy.errors.TargetError` for
    external models alone.
    """
    try:
        deployment = parse(SupervisorClient(state).status().document)
    except Unreachable:
        if not state.deployment_path.exists():
            raise
        deployment = stored_deployment(state)
        if deployment.cluster.address == "local":
            raise
    if not deployment.needs_controller:
        raise TargetError("every model is external: Tidegate deploys no replicas here")
    return ControllerClient(deployment.cluster.controller, state.secret())


def admin_token(state: StateDir, url: str) -> str:
    """The token for the admin port at ``url``, empty if none is known.

    That of the state directory is sent to this machine alone: loopback, and the deployment's ``admin_host``.
    """
    if given := os.environ.get(TOKEN_VARIABLE, ""):
        return given
    return state.admin_token() if state.admin_token_path.exists() and _is_own(state, url) else ""


def _is_own(state: StateDir, url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        if host == "localhost" or ip_address(host).is_loopback:
            return True
    except ValueError:  # another name
        pass
    return state.deployment_path.exists() and host == stored_deployment(state).gateway.admin_host
