"""Readiness of replicas and the gateway, by short blocking calls."""

from __future__ import annotations

import http.client
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from policy.config.deployment import Deployment, GatewayConfig
from policy.config.tls import ServerTls
from policy.errors import ConfigError, EngineFailed
from policy.scaling.reconcile_steps import MAX_FAILURES
from policy.types import EngineKind, FleetSnapshot, ReplicaPhase, Runner
from policy.wire.headers import CANARY_HEADER
from serve.controller.crash_loop_backoff import last_run
from store.state_dir import StateDir
from store.tls_files import client_context, ports_with_tls

_POLL_S = 2.0
# A first request can wait for a long engine step.
_REQUEST_S = 60.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def reachable(host: str) -> str:
    """The address of a listener on ``host``, which may be a wildcard."""
    return _WILDCARDS.get(host, host)


def client_url(gateway: GatewayConfig) -> str:
    """The URL of the client port, from this machine."""
    return _url(gateway.host, gateway.port, gateway.tls)


def admin_url(gateway: GatewayConfig) -> str:
    """The URL of the admin port, from this machine."""
    return _url(gateway.admin_host, gateway.admin_port, gateway.admin_tls)


def _url(host: str, port: int, tls: ServerTls | None) -> str:
    host = reachable(host)
    return f"http{'s' * (tls is not None)}://{f'[{host}]' if ':' in host else host}:{port}"


def idle(deployment: Deployment, fleet: FleetSnapshot) -> frozenset[str]:
    """The models with 0 desired replicas."""
    targets = {model.name: model.target for model in fleet.models}
    deployed = (spec.name for spec in deployment.models if spec.is_scaled)
    return frozenset(name for name in deployed if targets.get(name) == 0)


def waiting_for(deployment: Deployment, fleet: FleetSnapshot) -> list[str]:
    """Models that need a ready replica and have none, with the states of their replicas."""
    missing = []
    idle_models = idle(deployment, fleet)
    for spec in deployment.models:
        if not spec.is_scaled or spec.name in idle_models:
            continue
        replicas = [replica for replica in fleet.replicas if replica.model == spec.name]
        if any(replica.state is ReplicaPhase.READY for replica in replicas):
            continue
        notes = [replica.reason for replica in replicas if replica.reason]
        notes += [model.note for model in fleet.models if model.name == spec.name and model.note]
        states = ", ".join(f"{replica.id} {replica.state}" for replica in replicas) or "no replica yet"
        missing.append(f"{spec.name}: {states}" + (f" ({notes[0]})" if notes else ""))
    return missing


def without_controller(state: StateDir) -> str:
    """What is waited for while no controller answers; raises ``EngineFailed`` if it keeps failing."""
    run = last_run(state)
    if run is None or not run.error:
        return "waiting for the controller"
    if run.failures >= MAX_FAILURES:
        raise EngineFailed(str(run))
    return f"waiting for the controller ({run.error})"


def gateway_missing(deployment: Deployment, key: str) -> str | None:
    """Why the gateway is not ready, or ``None``: it must be healthy and list every model."""
    gateway = deployment.gateway
    status, body = call(gateway, "/readyz", admin=True)
    if status != 200:
        return f"not ready yet ({body.decode(errors='replace').strip()[:200] or status})"
    status, body = call(gateway, "/v1/models", key=key)
    listed = {model["id"] for model in msgspec.json.decode(body)["data"]} if status == 200 else set()
    unlisted = [spec.name for spec in deployment.models if spec.name not in listed]
    return f"models not listed yet: {', '.join(unlisted)}" if unlisted else None


def answers(deployment: Deployment, idle_models: Collection[str], key: str) -> None:
    """Generate one token with each text model except the ``idle_models``; raises ``EngineFailed``."""
    gateway = deployment.gateway
    for spec in deployment.models:
        external = spec.engine is EngineKind.EXTERNAL
        if external or spec.runner is not Runner.GENERATE or spec.name in idle_models:
            continue
        body = {"model": spec.name, "prompt": "Hello", "max_tokens": 1}
        status, answer = call(gateway, "/v1/completions", body, key=key, probe=True)
        if status != 200:
            text = answer.decode(errors="replace")[:500]
            raise EngineFailed(f"{spec.name} does not answer through the gateway: {status} {text}")


def call(
    gateway: GatewayConfig,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    admin: bool = False,
    key: str = "",
    probe: bool = False,
) -> tuple[int, bytes]:
    """Status and body of a POST, or a GET without ``body``; status 0 with the error without an answer."""
    timeout_s = _POLL_S if body is None else _REQUEST_S
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    if probe:  # of which scaling learns nothing
        headers[CANARY_HEADER] = "1"
    connection = None
    try:
        connection = _connection(gateway, admin=admin, timeout_s=timeout_s)
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, msgspec.json.encode(body), headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException, ConfigError) as error:
        return 0, str(error).encode()
    finally:
        if connection is not None:
            connection.close()


def _connection(gateway: GatewayConfig, *, admin: bool, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the admin or the client port; with TLS its certificate must be that of its file."""
    host, port = (gateway.admin_host, gateway.admin_port) if admin else (gateway.host, gateway.port)
    path = "gateway.admin_tls" if admin else "gateway.tls"
    if (tls := ports_with_tls(gateway).get(path)) is None:
        return http.client.HTTPConnection(reachable(host), port, timeout=timeout_s)
    context = client_context(tls, path)
    return http.client.HTTPSConnection(reachable(host), port, timeout=timeout_s, context=context)
