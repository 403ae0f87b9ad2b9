"""An actuator for models of both kinds: those that Tidegate starts, and external ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from policy.config.deployment import ModelSpec
from policy.errors import ActuatorFailed, NotLeader, Unreachable
from policy.scaling.reconcile_steps import LayerKey
from policy.types import EngineKind
from serve.actuator.interface import Actuator, ActuatorLayer, NodeResources
from serve.actuator.kubernetes import KubernetesActuator
from serve.host.weight_verification import ResolvedWeights

log = logging.getLogger("tidegate.controller")


class ActuatorByEngine:
    """The actuator port over ``own``, and over ``workloads`` for external models.

    Neither holds up the other: while one fails, its layers are those of its last answer.
    """

    def __init__(self, own: Actuator, workloads: KubernetesActuator) -> None:
        self.name = own.name
        self._own = own
        self._workloads = workloads
        self._external: frozenset[LayerKey] = frozenset()
        # By actuator: its last answer, and why it gives none now.
        self._last: dict[Actuator, Mapping[LayerKey, ActuatorLayer]] = {}
        self._failures: dict[Actuator, str] = {}

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        """Raises before the first answer of ``own``, whose layers may be parts of shared GPU groups."""
        external = await self._layers_of(self._workloads)
        self._external = frozenset(external)
        own = await self._layers_of(self._own)
        if self._own not in self._last:
            raise ActuatorFailed(self._failures[self._own])
        return {**own, **external}

    async def _layers_of(self, part: Actuator) -> Mapping[LayerKey, ActuatorLayer]:
        try:
            self._last[part] = await part.layers()
            self._failures.pop(part, None)
        except NotLeader:
            raise
        except (ActuatorFailed, Unreachable, OSError) as error:
            if part not in self._failures:
                log.warning("%s: %s", part.name, error)
            self._failures[part] = f"{part.name}: {error}"
        return self._last.get(part, {})

    def failure(self, model: ModelSpec) -> str:
        """Why the layers of ``model`` are unknown, or only known as they were; empty if they are known."""
        return self._failures.get(self._workloads if model.engine is EngineKind.EXTERNAL else self._own, "")

    def declare(self, models: Iterable[ModelSpec], earlier: Iterable[ModelSpec]) -> None:
        """The models of the deployment, and the configurations of ``earlier`` revisions that may still run.

        One that fails may be corrected by a deployment that was just applied.
        """
        self._workloads.declare(models, earlier)

    async def nodes(self) -> Sequence[NodeResources]:
        return await self._own.nodes()

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: ResolvedWeights | None, digest: str, count: int
    ) -> None:
        if model.engine is EngineKind.EXTERNAL:
            self._external |= {key}
        await self._of(key).deploy(key, model, weights, digest, count)

    async def scale(self, key: LayerKey, count: int) -> None:
        await self._of(key).scale(key, count)

    async def kill(self, key: LayerKey, replica: str) -> None:
        await self._of(key).kill(key, replica)

    async def delete(self, key: LayerKey) -> None:
        await self._of(key).delete(key)

    async def stop(self) -> None:
        """Delete the layers of Tidegate's own replicas; workloads keep their pods, as others may use them."""
        await self._own.stop()

    async def close(self) -> None:
        await self._own.close()
        await self._workloads.close()

    def _of(self, key: LayerKey) -> Actuator:
        return self._workloads if key in self._external else self._own
