"""Which models and replicas there are, from the newest word that reached this worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from gateway.metrics import Metrics
from gateway.replicas import Link
from gateway.shared import ALONE, Shared
from policy.config import Deployment
from policy.types import EMPTY_FLEET, EngineKind, Fleet, Load, Replica, ReplicaState, Runner

# A controller that was just started may not have heard of every replica yet.
SETTLE_S = 2.0

Source = Literal["none", "disk", "controller"]


class Served:
    """A model as this worker serves it: what the deployment says of it and its replicas."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.runner = Runner.GENERATE
        self.engine = EngineKind.VLLM
        self.created = 0
        self.max_model_len: int | None = None
        self.links: list[Link] = []

    @property
    def adapters(self) -> list[str]:
        """Adapters that some replica holds."""
        return sorted({name for link in self.links for name in link.adapters})


class FleetView:
    """The models by name. ``on_capacity`` is told whenever a replica of a model may take more."""

    def __init__(self, secret: str, metrics: Metrics, shared: Shared = ALONE) -> None:
        self._secret = secret
        self._shared = shared
        self._metrics = metrics
        self._served: dict[str, Served] = {}
        self._documented: frozenset[str] = frozenset()
        self._connect_timeout_s = 2.0
        self.fleet: Fleet = EMPTY_FLEET
        self.source: Source = "none"
        self.seen_at: float | None = None
        self._epoch_began = 0.0
        self.on_capacity: Callable[[str], None] = lambda model: None

    @property
    def models(self) -> list[Served]:
        """All models, in the order of the document."""
        return list(self._served.values())

    def find(self, name: str) -> tuple[Served, str | None] | None:
        """The model that serves ``name`` and the adapter it names, if it is one."""
        served = self._served.get(name)
        if served is not None:
            return served, None
        for candidate in self._served.values():
            if any(name in link.adapters for link in candidate.links):
                return candidate, name
        return None

    def read_document(self, deployment: Deployment) -> None:
        """Take the models of the deployment document; what is no longer in it is dropped."""
        self._connect_timeout_s = deployment.gateway.connect_timeout_s
        self._documented = frozenset(spec.name for spec in deployment.models)
        for spec in deployment.models:
            served = self._of(spec.name)
            served.runner, served.engine = spec.runner, spec.engine
        self._drop_unknown()
        for served in self._served.values():
            for link in served.links:
                link.pool.connect_timeout_s = self._connect_timeout_s

    def take(self, fleet: Fleet, source: Source, at: float) -> None:
        """Follow a snapshot of the controller (or of the last one, from disk); ``at`` is loop time.

        In the first :data:`SETTLE_S` of a new epoch a replica that it does not list as ready is kept
        while the replica itself says that it is.
        """
        if fleet.epoch != self.fleet.epoch:
            self._epoch_began = at
        self.source = source
        self.seen_at = at
        self.fleet = fleet
        for model in fleet.models:
            served = self._of(model.name)
            served.created = model.created
            served.max_model_len = model.max_model_len
            if model.name not in self._documented:
                served.runner, served.engine = model.runner, model.engine
        self._drop_unknown()
        by_model: dict[str, list[Replica]] = {}
        for replica in fleet.replicas:
            if replica.url and replica.state in (ReplicaState.READY, ReplicaState.DRAINING):
                by_model.setdefault(replica.model, []).append(replica)
        settling = at < self._epoch_began + SETTLE_S
        for served in self._served.values():
            if served.engine is EngineKind.EXTERNAL:
                continue
            replicas = by_model.get(served.name, [])
            if settling:
                listed = {replica.id for replica in replicas}
                replicas += [
                    link.replica
                    for link in served.links
                    if link.id not in listed and link.answering and link.open
                ]
            self._link(served, replicas)

    def set_external(self, name: str, replicas: list[Replica], max_model_len: int | None) -> None:
        """Follow the servers of an external model: those that answered are ready."""
        served = self._served.get(name)
        if served is None or served.engine is not EngineKind.EXTERNAL:
            return
        served.max_model_len = max_model_len
        self._link(served, replicas)
        for link in served.links:
            link.answering = link.replica.state is ReplicaState.READY
            link.open, link.full = True, False
            link.adapters = frozenset(link.replica.adapters)
        self._news(served)

    def close(self) -> None:
        """Stop following everything."""
        for served in self._served.values():
            self._link(served, [])

    def _of(self, name: str) -> Served:
        served = self._served.get(name)
        if served is None:
            served = self._served[name] = Served(name)
        return served

    def _drop_unknown(self) -> None:
        known = self._documented | {model.name for model in self.fleet.models}
        for name in [name for name in self._served if name not in known]:
            self._link(self._served.pop(name), [])

    def _link(self, served: Served, replicas: list[Replica]) -> None:
        links = {link.id: link for link in served.links}
        kept: list[Link] = []
        for replica in replicas:
            link = links.get(replica.id)
            if link is not None and link.url == replica.url:
                del links[replica.id]
                if replica != link.replica:
                    link.replica = replica
                    link.retry_now()
            else:
                link = self._open(served, replica)
            kept.append(link)
        for link in links.values():
            link.close()
        served.links = kept
        self._news(served)

    def _open(self, served: Served, replica: Replica) -> Link:
        if served.engine is EngineKind.EXTERNAL:
            return Link(replica, self._connect_timeout_s, None, self._shared)
        link = Link(replica, self._connect_timeout_s, self._secret, self._shared)
        link.subscribe(self._secret, lambda _: self._news(served))
        return link

    def _news(self, served: Served) -> None:
        up = sum(link.admissible or link.full for link in served.links)
        self._metrics.model(served.name).replicas_up = up
        if up:
            self.on_capacity(served.name)

    def describe(self) -> dict[str, object]:
        """The snapshot with its age, and each replica as this worker sees it."""
        now = asyncio.get_running_loop().time()
        return {
            "source": self.source,
            "age_s": None if self.seen_at is None else round(now - self.seen_at, 3),
            "fleet": self.fleet,
            "replicas": [
                {
                    "id": link.id,
                    "model": link.model,
                    "url": link.url,
                    "admissible": link.admissible,
                    "answering": link.answering,
                    "open": link.open,
                    "state": link.replica.state,
                    "in_flight": link.in_flight,
                    "mine": link.mine,
                    "bound": link.bound,
                    "adapters": sorted(link.adapters),
                    "heard_s_ago": None if link.heard_at is None else round(now - link.heard_at, 3),
                }
                for served in self._served.values()
                for link in served.links
            ],
        }


def external_replica(model: str, url: str, *, ready: bool, adapters: tuple[str, ...], at: float) -> Replica:
    """A server that Tidegate does not deploy, in the fleet's words."""
    return Replica(
        id=url.removeprefix("http://"),
        model=model,
        shape="external",
        generation=0,
        state=ReplicaState.READY if ready else ReplicaState.STOPPED,
        load=Load(at=at),
        url=url,
        adapters=adapters,
    )
