"""Orders to Ray of controllers that elect their leader: an actor refuses terms that are over.

Serve's API knows no terms. A deposed leader that was paused before an order, and then wakes up, finds at the
actor that a later term has begun. Ray keeps the actor on some node while there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from policy.config.deployment import Cluster, ModelSpec
from policy.errors import ActuatorFailed, NotLeader, TidegateError
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator.interface import ActuatorLayer, NodeResources, deployment_id
from serve.actuator.ray import RayActuator
from serve.actuator.serve_application_status import SERVE_ENVIRONMENT
from serve.host.weight_verification import ResolvedWeights
from store.state_dir import StateDir

NAMESPACE = "tidegate"
# A deploy waits for Serve's controller to start; the other orders take milliseconds.
ORDER_S = 60.0


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """A leader's term, and how its orders reach Ray."""

    number: int
    root: str
    secret: str
    cluster: Cluster
    dashboard: str
    token: str


@dataclass(frozen=True)
class _State(StateDir):
    """The leader's state directory, on a node that has none."""

    given: str

    def secret(self) -> str:
        return self.given


class OrderActor:
    """Refuses orders of a term that is over. The highest term is in the GCS, as the actor may be moved."""

    def __init__(self, deployment: str) -> None:
        self._key = _term_key(deployment)
        self._highest = highest_term(deployment)
        self._term: Term | None = None
        self._actuator: RayActuator | None = None
        self._one_at_a_time = asyncio.Lock()

    async def order(self, encoded: bytes, call: str, arguments: tuple[Any, ...]) -> Any:
        """Call the actuator's method ``call``; raises :class:`policy.errors.NotLeader`."""
        term = msgspec.json.decode(encoded, type=Term)
        async with self._one_at_a_time:
            if term.number < self._highest:
                raise NotLeader(f"an order of term {term.number} comes after one of term {self._highest}")
            if term.number > self._highest:
                internal_kv._internal_kv_put(self._key, str(term.number).encode(), overwrite=True)
                self._highest = term.number
            if self._actuator is None or term != self._term:
                if self._actuator is not None:
                    await self._actuator.close()
                state = _State(Path(term.root), term.secret)
                self._actuator = RayActuator(state, term.cluster, term.dashboard, term.token)
                self._term = term
            return await getattr(self._actuator, call)(*arguments)


def highest_term(deployment: str) -> int:
    """The highest term whose orders this cluster carried out, 0 before there was any."""
    return int(internal_kv._internal_kv_get(_term_key(deployment)) or 0)


def _term_key(deployment: str) -> bytes:
    return f"tidegate-term-{deployment}".encode()


class RayOrders:
    """The actuator port of one term over the actor, which is made if there is none yet."""

    name = "ray"

    def __init__(self, term: Term) -> None:
        self._term = msgspec.json.encode(term)
        deployment = deployment_id(_State(Path(term.root), term.secret))
        # Beside the leader, which may be there so as to outlive the head.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self._actor: ActorHandle = (
            ray.remote(num_cpus=0, max_restarts=-1)(OrderActor)
            .options(
                name=f"tidegate-orders-{deployment}", namespace=NAMESPACE, lifetime="detached",
                get_if_exists=True, runtime_env={"env_vars": SERVE_ENVIRONMENT},
                scheduling_strategy=here,
            )
            .remote(deployment)
        )  # fmt: skip

    async def _order(self, call: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(ORDER_S):
                return await self._actor.order.remote(self._term, call, arguments)
        except TidegateError:
            raise
        except (RayError, TimeoutError) as error:
            raise ActuatorFailed(f"Ray does not carry out {call!r}: {error!r}") from error

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        return dict(await self._order("layers"))

    async def nodes(self) -> Sequence[NodeResources]:
        return tuple(await self._order("nodes"))

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: ResolvedWeights | None, digest: str, count: int
    ) -> None:
        await self._order("deploy", key, model, weights, digest, count)

    async def scale(self, key: LayerKey, count: int) -> None:
        await self._order("scale", key, count)

    async def kill(self, key: LayerKey, replica: str) -> None:
        await self._order("kill", key, replica)

    async def delete(self, key: LayerKey) -> None:
        await self._order("delete", key)

    async def stop(self) -> None:
        await self._order("stop")

    async def close(self) -> None:
        """The actor goes on, for the next leader."""
