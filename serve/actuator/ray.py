"""The actuator on Ray Serve: one application per layer, scaled only through Serve's scale API.

An application is never redeployed: that would replace its running replicas. Its name contains the deployment,
so that several deployments can share a cluster. Source of the REST paths: Ray 2.60,
``dashboard/modules/serve/serve_head.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import ray
from ray import serve as ray_serve
from ray.serve.api import RunTarget

from policy.config.deployment import Cluster, ModelSpec
from policy.config.port_conflicts import is_loopback
from policy.errors import ActuatorFailed
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator.interface import (
    ActuatorLayer,
    LayerCache,
    NodeResources,
    deployment_id,
    host_spec,
    same_host,
)
from serve.actuator.placement_feasibility import node_sizes
from serve.actuator.serve_application_status import (
    DEPLOYMENT,
    application_name,
    held_layers,
    required_resources,
)
from serve.host.ray_replica import RayHost
from serve.host.weight_verification import ResolvedWeights
from store.state_dir import StateDir

# Of Serve's replica actors: ``ray.serve._private.constants``, Ray 2.60.
SERVE_NAMESPACE = "serve"

# Serve waits this long before a replica's shutdown hook; the hook is what refuses new requests.
BEFORE_HOOK_S = 0.1

AFTER_DRAIN_S = 15.0
# The drain timeout may be raised to this while replicas run; Serve's own limit is fixed at deployment.
LIVE_DRAIN_S = 600.0

# Serve replaces a replica after three such checks. The controller is quicker, as long as it runs.
HEALTH_CHECK_TIMEOUT_S = 10.0


class RayActuator:
    """The actuator port over Serve's REST API and, to deploy, its Python API."""

    name = "ray"

    def __init__(self, state: StateDir, cluster: Cluster, dashboard: str, token: str) -> None:
        self._state = state
        self._id = deployment_id(state)
        self._cluster = cluster
        self._applications: dict[LayerKey, str] = {}
        # By application: the counts of deployed layers that Serve does not list in full yet.
        self._deploying: dict[str, int] = {}
        # Serve's API takes 20 ms of its controller and its dashboard.
        self._last = LayerCache(self._ask)
        self._http = httpx.AsyncClient(
            base_url=f"http://{dashboard}",
            headers={"authorization": f"Bearer {token}"},
            timeout=10.0,
            trust_env=False,
        )

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        """As Serve reported last. What else happens to a layer, such as failed starts, is known later."""
        return await self._last.get()

    async def _ask(self) -> Mapping[LayerKey, ActuatorLayer]:
        answer = await self._call("GET", "/api/serve/applications/")
        for name, application in answer["applications"].items():
            if application["deployments"]:
                self._deploying.pop(name, None)
        held = {}
        for key, name, layer in held_layers(answer, self._id, self._deploying):
            self._applications[key] = name
            held[key] = layer
        return held

    async def nodes(self) -> Sequence[NodeResources]:
        return await asyncio.to_thread(node_sizes)

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: ResolvedWeights | None, digest: str, count: int
    ) -> None:
        if key in await self._last.ask():
            return
        drain_s = model.control.mode.drain_timeout_s
        # Where others reach the node, as in a cluster that was joined, engines listen on its address.
        loopback = self._cluster.address == "local" and is_loopback(self._cluster.node_ip)
        spec = host_spec(key, model, weights, self._state, self._cluster.controller, loopback)
        deployment = ray_serve.deployment(
            name=DEPLOYMENT,
            num_replicas=count,
            ray_actor_options=required_resources(model, model.shapes[key.shape], self._cluster),
            max_ongoing_requests=1,
            health_check_period_s=2.0,
            # Serve waits for the check that ends a start without this limit; later ones return at once.
            health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
            graceful_shutdown_wait_loop_s=BEFORE_HOOK_S,
            graceful_shutdown_timeout_s=max(drain_s, LIVE_DRAIN_S) + AFTER_DRAIN_S,
        )
        # Ray's own version of each deploy is random: to repeat one would replace every replica.
        versioned = deployment(RayHost).options(version=digest, _internal=True)
        name = application_name(self._id, key, digest)
        target = RunTarget(
            target=versioned.bind(msgspec.json.encode(spec)),
            name=name,
            route_prefix=None,
            external_scaler_enabled=True,
        )
        self._deploying[name] = count
        self._last.changed()
        await asyncio.to_thread(_deploy, target)

    async def scale(self, key: LayerKey, count: int) -> None:
        if key not in self._applications:
            await self._last.ask()
        name = self._applications.get(key)
        if name is None:
            raise ActuatorFailed(f"there is no layer {key} to scale")
        path = f"/api/v1/applications/{quote(name, safe='')}/deployments/{DEPLOYMENT}/scale"
        self._last.changed()
        await self._call("POST", path, {"target_num_replicas": count})

    async def kill(self, key: LayerKey, replica: str) -> None:
        if key not in self._applications:
            await self._last.ask()
        answer = await self._call("GET", "/api/serve/applications/")
        application = answer["applications"].get(self._applications.get(key))
        if application is None or DEPLOYMENT not in application["deployments"]:
            return
        self._last.changed()
        for host in application["deployments"][DEPLOYMENT]["replicas"]:
            if same_host(host["replica_id"], replica):
                await asyncio.to_thread(_kill, host["actor_name"])

    async def delete(self, key: LayerKey) -> None:
        await self._last.ask()
        name = self._applications.pop(key, None)
        if name is not None:
            self._last.changed()
            await asyncio.to_thread(ray_serve.delete, name, _blocking=False)

    async def stop(self) -> None:
        await self._last.ask()
        names = list(self._applications.values())
        self._applications.clear()
        self._last.changed()
        for name in names:
            await asyncio.to_thread(ray_serve.delete, name, _blocking=True)

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: object = None) -> Any:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ActuatorFailed(f"Serve's API does not answer: {error!r}") from error
        if answer.status_code != httpx.codes.OK:
            raise ActuatorFailed(f"Serve's API answered {answer.status_code}: {answer.text[:300]}")
        return answer.json()


def _kill(actor: str) -> None:
    try:
        # A process that is stopped does not take the request: after some seconds its raylet kills it.
        ray.kill(ray.get_actor(actor, namespace=SERVE_NAMESPACE))
    except ValueError:
        return  # It has ended.


def _deploy(target: RunTarget) -> None:
    try:
        ray_serve.start(proxy_location="Disabled")
        ray_serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )
    except Exception as error:
        # Ray may raise any of its errors; the controller retries at its next tick.
        raise ActuatorFailed(f"Serve did not take {target.name}: {error}") from error
