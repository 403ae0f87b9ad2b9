"""The actuator port: the only way in which the controller changes what runs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from policy.config.deployment import ModelSpec
from policy.scaling.reconcile_steps import LayerKey
from policy.stats.backoff import Backoff
from serve.host.replica_host import HostSpec
from serve.host.version_check import installed
from serve.host.weight_verification import ResolvedWeights
from store.state_dir import StateDir

ASK = Backoff(0.2, 2.0)


class NodeResources(msgspec.Struct, frozen=True, kw_only=True):
    """All resources of one node by Ray's names; of each that is not named it has ``others``."""

    resources: Mapping[str, float]
    others: float = 0.0

    def has(self, name: str) -> float:
        """How much of a resource it has, in use or not."""
        return self.resources.get(name, self.others)


class ActuatorLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer as the actuator holds it: its desired count, and in ``trouble`` why starts fail.

    ``waits`` says which resources its replicas wait for, of which ``unplaced`` have none yet. ``retry_at`` is
    the next start (Unix seconds) after failed ones, if known. The replicas of a layer that ``sleeps`` exist:
    they are woken and put to sleep. ``hosts`` are the ids of its hosts, if they send heartbeats and
    nothing else replaces one that hangs.
    """

    wanted: int
    digest: str = ""
    trouble: str = ""
    waits: str = ""
    unplaced: int = 0
    retry_at: float | None = None
    sleeps: bool = False
    hosts: tuple[str, ...] = ()


def host_spec(  # noqa: PLR0917
    key: LayerKey,
    model: ModelSpec,
    weights: ResolvedWeights | None,
    state: StateDir,
    controller: str,
    loopback: bool,
) -> HostSpec:
    """The specification of a host of layer ``key``."""
    return HostSpec(
        model=model, weights=weights, shape=key.shape, generation=key.generation, state_dir=str(state.root),
        controller=controller, secret=state.secret(), loopback=loopback, versions=installed(),
    )  # fmt: skip


def host_part(host: str) -> str:
    """The unique part of the id of a host, which the id of its replica has too."""
    return host.rpartition("-")[2]


def same_host(host: str, replica: str) -> bool:
    """Whether ``replica`` runs on the host with this id."""
    return host_part(host) == host_part(replica)


def deployment_id(state: StateDir) -> str:
    """Eight hex digits that identify this deployment on a cluster: a digest of its secret.

    A directory would not do: two machines may have the same path.
    """
    return hashlib.sha256(f"deployment {state.secret()}".encode()).hexdigest()[:8]


class LayerCache:
    """The layers as a cluster answered last: asked after each change of ours, else ever less often.

    Unchanged, it is asked every :data:`ASK` seconds.
    """

    def __init__(self, asked: Callable[[], Awaitable[Mapping[LayerKey, ActuatorLayer]]]) -> None:
        self._asked = asked
        self.value: Mapping[LayerKey, ActuatorLayer] | None = None
        self._same = 0
        self._ask_at = 0.0

    def changed(self) -> None:
        """Ask at the next occasion."""
        self._same, self._ask_at = 0, 0.0

    async def get(self) -> Mapping[LayerKey, ActuatorLayer]:
        """The last answer, or a new one if it is due."""
        now = asyncio.get_running_loop().time()
        if self.value is None or now >= self._ask_at:
            before = self.value
            self._same = self._same + 1 if await self.ask() == before else 1
            self._ask_at = now + ASK.delay_s(self._same)
        assert self.value is not None
        return self.value

    async def ask(self) -> Mapping[LayerKey, ActuatorLayer]:
        """A new answer."""
        self.value = await self._asked()
        return self.value


class Actuator(Protocol):
    """Creates, scales and deletes layers.

    Every call is idempotent, and raises :class:`policy.errors.ActuatorFailed` when the cluster refuses or
    does not answer; the controller retries at its next tick.
    """

    name: str

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        """The layers that exist, also those of a predecessor of this process."""

    async def nodes(self) -> Sequence[NodeResources]:
        """The nodes that replicas may be placed on; none if that is not known."""

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: ResolvedWeights | None, digest: str, count: int
    ) -> None:
        """Create the layer with ``count`` >= 1 replicas; an existing one is not changed.

        ``weights`` are those of the revision, ``None`` for an engine without weights.
        """

    async def scale(self, key: LayerKey, count: int) -> None:
        """Set the count of an existing layer, 0 allowed; removed replicas drain first."""

    async def kill(self, key: LayerKey, replica: str) -> None:
        """Kill the host of a replica of the layer, which hangs; another one is started in its place.

        No effect if there is no such host.
        """

    async def delete(self, key: LayerKey) -> None:
        """Delete the layer; no effect if it does not exist."""

    async def stop(self) -> None:
        """Delete every layer of this deployment."""

    async def close(self) -> None:
        """Close files and connections; replicas continue."""
