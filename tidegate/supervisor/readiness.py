"""Whether replicas and the gateway answer yet: small blocking calls, made in a thread."""

from __future__ import annotations

import http.client
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from policy.config.deployment import Deployment
from policy.errors import EngineFailed
from policy.types import EngineKind, Fleet, ReplicaPhase, Runner

_POLL_S = 2.0
# A first request may wait for a long step of a busy engine.
_REQUEST_S = 60.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def reachable(host: str) -> str:
    """An address to call a listener on ``host`` at: a wildcard is not one."""
    return _WILDCARDS.get(host, host)


def endpoint(host: str, port: int) -> str:
    """The base URL of a listener."""
    host = reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def idle(deployment: Deployment, fleet: Fleet) -> frozenset[str]:
    """The models of ours of which the controller wants no replica."""
    targets = {model.name: model.target for model in fleet.models}
    ours = (spec.name for spec in deployment.models if spec.engine is not EngineKind.EXTERNAL)
    return frozenset(name for name in ours if targets.get(name) == 0)


def waiting_for(deployment: Deployment, fleet: Fleet) -> list[str]:
    """What each model of ours that is not idle lacks until one replica is ready; empty when nothing."""
    lacking = []
    unwanted = idle(deployment, fleet)
    for spec in deployment.models:
        if spec.engine is EngineKind.EXTERNAL or spec.name in unwanted:
            continue
        replicas = [replica for replica in fleet.replicas if replica.model == spec.name]
        if any(replica.state is ReplicaPhase.READY for replica in replicas):
            continue
        notes = [replica.reason for replica in replicas if replica.reason]
        notes += [model.note for model in fleet.models if model.name == spec.name and model.note]
        states = ", ".join(f"{replica.id} {replica.state}" for replica in replicas) or "no replica yet"
        lacking.append(f"{spec.name}: {states}" + (f" ({notes[0]})" if notes else ""))
    return lacking


def gateway_lacks(deployment: Deployment, key: str) -> str | None:
    """What the gateway lacks: that it is ready and lists every model; ``None`` when nothing.

    ``key`` is the one that it takes from us.
    """
    gateway = deployment.gateway
    status, body = _call(gateway.admin_host, gateway.admin_port, "GET", "/readyz")
    if status != 200:
        return f"not ready yet ({body.decode(errors='replace').strip()[:200] or status})"
    status, body = _call(gateway.host, gateway.port, "GET", "/v1/models", key=key)
    listed = {model["id"] for model in msgspec.json.decode(body)["data"]} if status == 200 else set()
    missing = [spec.name for spec in deployment.models if spec.name not in listed]
    return f"models not listed yet: {', '.join(missing)}" if missing else None


def answers(deployment: Deployment, unwanted: Collection[str], key: str) -> None:
    """One token from each text model of ours but the ``unwanted``; raises ``EngineFailed``."""
    gateway = deployment.gateway
    for spec in deployment.models:
        if spec.engine is EngineKind.EXTERNAL or spec.runner is not Runner.GENERATE:
            continue
        if spec.name in unwanted:
            continue
        body = {"model": spec.name, "prompt": "Hello", "max_tokens": 1}
        status, answer = _call(
            gateway.host, gateway.port, "POST", "/v1/completions", body, key=key, timeout_s=_REQUEST_S
        )
        if status != 200:
            text = answer.decode(errors="replace")[:500]
            raise EngineFailed(f"{spec.name} does not answer through the gateway: {status} {text}")


def _call(
    host: str,
    port: int,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    key: str = "",
    timeout_s: float = _POLL_S,
) -> tuple[int, bytes]:
    """Status and body; status 0 with the reason when nobody answers."""
    connection = http.client.HTTPConnection(reachable(host), port, timeout=timeout_s)
    try:
        payload = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error).encode()
    finally:
        connection.close()
