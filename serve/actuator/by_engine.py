"""An actuator for models of both kinds: those that Tidegate starts, and external ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policy.config.deployment import ModelSpec
from policy.scaling.reconcile_steps import LayerKey
from policy.types import EngineKind
from serve.actuator.interface import Actuator, ActuatorLayer, NodeResources
from serve.host.weight_verification import ResolvedWeights


class ActuatorByEngine:
    """The actuator port over ``own``, and over ``workloads`` for external models."""

    def __init__(self, own: Actuator, workloads: Actuator) -> None:
        self.name = own.name
        self._own = own
        self._workloads = workloads
        self._external: frozenset[LayerKey] = frozenset()

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        external = await self._workloads.layers()
        self._external = frozenset(external)
        return {**await self._own.layers(), **external}

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
