"""The actuator port: the only way in which the controller changes what runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from policy.config.deployment import ModelSpec
from policy.scaling.rollout import LayerKey
from serve.host.weights import Weights


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A layer as the actuator holds it: the count it was asked for, and what is wrong with it.

    What it ``waits`` for, if there is no room for its replicas, may come yet.
    Starts that fail are tried again after pauses that grow, next at ``retry_at`` (Unix seconds) if known.
    The replicas of one that ``sleeps`` are there already: they are woken and put to sleep.
    """

    wanted: int
    digest: str = ""
    trouble: str = ""
    waits: str = ""
    retry_at: float | None = None
    sleeps: bool = False


class Actuator(Protocol):
    """Makes layers, sets their counts and ends them.

    Every call is idempotent. Raises :class:`policy.errors.ActuatorFailed` when the cluster refuses
    or does not answer; the controller tries again at its next tick.
    """

    name: str

    async def layers(self) -> Mapping[LayerKey, Held]:
        """What is held now, also by a predecessor of this process."""

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: Weights | None, digest: str, count: int
    ) -> None:
        """Make the layer with ``count`` >= 1 replicas; one that exists is left as it is.

        ``weights`` are those of the generation, ``None`` for an engine that has none.
        """

    async def scale(self, key: LayerKey, count: int) -> None:
        """Set the count of a layer that exists, 0 allowed; replicas that leave drain first."""

    async def delete(self, key: LayerKey) -> None:
        """End the layer; one that does not exist is no error."""

    async def stop(self) -> None:
        """End every layer that Tidegate made."""

    async def close(self) -> None:
        """Let go of files and connections; what runs goes on."""
