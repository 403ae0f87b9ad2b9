"""The models and replicas that this worker knows, from the newest snapshot that it received."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Literal

from gateway.routing.engine_cache.external_server_caches import ServerCaches
from gateway.routing.external_server_options import ServerAccess
from gateway.routing.fleet_listeners import NO_EVENTS, FleetListeners
from gateway.routing.replica_handle import ReplicaHandle
from gateway.routing.shared_counters import LOCAL, SharedCounts
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.scrape import ScrapedReplica
from policy import types
from policy.config.deployment import Deployment, OutlierEjection, RetryBudget
from policy.engine.builtin_profiles import shipped
from policy.engine.performance_model import Timing
from policy.routing.concurrency_limit import ServerQueue
from policy.routing.replica_health import HealthCounters, ReplicaHealth
from policy.scaling.reconcile_steps import LayerKey
from policy.types import EMPTY_FLEET, EngineKind, FleetSnapshot, Replica, ReplicaPhase, Runner

Source = Literal["none", "disk", "controller"]

# A controller that has just started may not know every replica yet.
SETTLE_S = 2.0
# Within this time, the host may be restarting a replica that is unreachable.
RESTART_S = 10.0
# Snapshots arrive twice a second; an older one does not show what is starting now.
SNAPSHOT_STALE_S = 5.0
# The most adapters whose load failure is kept.
MAX_LOAD_FAILURES = 256


class ServedModel:
    """A model as this worker serves it: its settings and its replicas.

    ``coming``: replicas start, or it has none by intent; ``down``: none serves; ``asleep``: none serves or
    starts; ``removed``: one that is added under its name is another. ``start_s``: the slowest measured start.
    ``load_failures``: the code of an adapter's load failure.
    Since ``closing_since`` replicas of other layers than the desired one (``layer``: shape and generation)
    take what ends before they drain at ``closes_at``, both in loop time. ``gives_way``: some have
    drained for others that are still to come. ``leaving`` left the fleet with requests in flight.
    """

    def __init__(self, name: str, health: ReplicaHealth | None = None) -> None:
        self.name = name
        self.health = health or ReplicaHealth(HealthCounters(), lambda: 0.5)
        self.runner = Runner.GENERATE
        self.engine = EngineKind.VLLM
        self.created = 0
        self.max_model_len: int | None = None
        self.handles, self.leaving = list[ReplicaHandle](), list[ReplicaHandle]()
        self.coming = True
        self.down = self.asleep = self.gives_way = self.removed = False
        self.start_s: float | None = None
        self.snapshot_at = 0.0
        self.load_failures: dict[str, str] = {}
        self.layer = ("", 0)
        self.timings: dict[str, Timing] = {}
        self.closing_since = self.closes_at = math.inf

    def stays(self, replica: Replica) -> bool:
        """Whether ``replica`` is of the desired layer."""
        return (replica.shape, replica.generation) == self.layer

    def is_unavailable(self, at: float) -> bool:
        """Whether no replica is reachable and none is starting; ``at`` is loop time.

        False for a model that is scaled to zero, and for one that was not checked yet; a removed one is.
        """
        if not self.handles or any(handle.answering for handle in self.handles):
            return self.removed
        if self.engine is EngineKind.EXTERNAL:
            return True
        if self.coming or at > self.snapshot_at + SNAPSHOT_STALE_S:
            return False
        return all(handle.lost_at is not None and at > handle.lost_at + RESTART_S for handle in self.handles)

    @property
    def listed(self) -> list[str]:
        """The adapters that its servers list, of an external model."""
        if self.engine is not EngineKind.EXTERNAL:
            return []
        return sorted({name for handle in self.handles for name in handle.adapters.loaded})

    def record_load_failure(self, adapter: str, cause: str) -> None:
        """A replica could not load ``adapter``; ``cause`` is its error code."""
        if len(self.load_failures) >= MAX_LOAD_FAILURES:
            self.load_failures.clear()
        self.load_failures[adapter] = cause

    def cannot_load(self, adapter: str) -> bool:
        """Whether every replica that is up has failed to load ``adapter``."""
        refused = False
        for handle in self.handles:
            if handle.adapters.loads:
                if not handle.adapters.serves(adapter):
                    refused = True
                elif handle.admissible or handle.full:
                    return False
        return refused


class FleetView:
    """The models by name. ``draw`` yields random numbers in [0, 1), which spread the probes of workers."""

    def __init__(
        self,
        secret: str,
        metrics: WorkerMetrics,
        shared: SharedCounts = LOCAL,
        draw: Callable[[], float] = lambda: 0.5,
        events: FleetListeners = NO_EVENTS,
        *,
        caches: ServerCaches | None = None,
    ) -> None:
        self._events, self._caches = events, caches
        self._secret, self._shared = secret, shared
        self._draw = draw
        self._eject, self._retry = OutlierEjection(), RetryBudget()
        self._metrics = metrics
        self._served: dict[str, ServedModel] = {}
        self._documented: frozenset[str] = frozenset()
        # The layers of pods of external models, by model and replica.
        self._layers: dict[tuple[str, str], LayerKey] = {}
        self._connect_timeout_s = 2.0
        self._multiplexed = True
        self.fleet: FleetSnapshot = EMPTY_FLEET
        self.source: Source = "none"
        self.seen_at: float | None = None
        self._epoch_began = 0.0

    @property
    def models(self) -> list[ServedModel]:
        """All models, in the order of the deployment."""
        return list(self._served.values())

    def get(self, name: str) -> ServedModel | None:
        return self._served.get(name)

    def listing(self, name: str) -> tuple[ServedModel, str] | None:
        """The external model whose servers list ``name`` or ``BASE:NAME``, and its name."""
        for served in self._served.values():
            if served.engine is EngineKind.EXTERNAL:
                for own in (name, name.removeprefix(served.name + ":")):
                    if any(own in handle.adapters.loaded for handle in served.handles):
                        return served, own
        return None

    def read_document(self, deployment: Deployment) -> None:
        """Apply the models of the deployment; those that are no longer in it are dropped."""
        self._connect_timeout_s = deployment.gateway.connect_timeout_s
        self._multiplexed = deployment.gateway.replica_protocol is types.ReplicaProtocol.FRAMES
        self._eject, self._retry = deployment.gateway.eject, deployment.gateway.retry
        self._documented = frozenset(spec.name for spec in deployment.models)
        for spec in deployment.models:
            served = self._of(spec.name)
            served.runner, served.engine = spec.runner, spec.engine
            is_timed = spec.engine is EngineKind.EXTERNAL and spec.timed_by is not None
            served.timings = {name: shipped(spec, each) for name, each in spec.shapes.items() if is_timed}
        self._drop_unknown()
        for served in self._served.values():
            served.health.configure(self._eject, self._retry)
            for handle in served.handles:
                handle.pool.connect_timeout_s = self._connect_timeout_s

    def take(self, fleet: FleetSnapshot, source: Source, at: float) -> None:
        """Follow a snapshot of the controller, or the last one from disk; ``at`` is loop time.

        For :data:`SETTLE_S` after a new epoch, replicas that report ready are kept even if it does not list
        them.
        """
        if fleet.epoch != self.fleet.epoch:
            self._epoch_began = at
        self.source, self.seen_at, self.fleet = source, at, fleet
        for model in fleet.models:
            served = self._of(model.name)
            served.created, served.layer = model.created, (model.shape, model.generation)
            if served.engine is not EngineKind.EXTERNAL:  # its servers say
                served.max_model_len = model.max_model_len
            if source == "controller" and model.closes_s is not None:
                served.closing_since = min(served.closing_since, at)
                served.closes_at = at + model.closes_s
            else:
                served.closing_since = served.closes_at = math.inf
            mine = [replica for replica in fleet.replicas if replica.model == model.name]
            states = [replica.state for replica in mine]
            ready = sum(each.state is ReplicaPhase.READY and served.stays(each) for each in mine)
            drains = any(each.state is ReplicaPhase.DRAINING and not served.stays(each) for each in mine)
            served.gives_way = ready < model.target and (served.gives_way or drains)
            # Replicas start, or there are none by intent.
            served.coming = ReplicaPhase.STARTING in states or states.count(ReplicaPhase.READY) < max(
                1, model.target
            )
            served.down = ReplicaPhase.READY not in states
            served.asleep = served.down and ReplicaPhase.STARTING not in states
            # A sleeping replica is woken, not started.
            starts_s = [replica.start_s if replica.wake_s is None else replica.wake_s for replica in mine]
            measured_s = [start_s for start_s in starts_s if start_s is not None]
            served.start_s = max(measured_s, default=served.start_s)
            if model.name not in self._documented:
                served.runner, served.engine = model.runner, model.engine
        self._drop_unknown()
        external = {each.name for each in self._served.values() if each.engine is EngineKind.EXTERNAL}
        self._layers = {
            (each.model, each.id): LayerKey.of(each) for each in fleet.replicas if each.model in external
        }
        by_model: dict[str, list[Replica]] = {}
        for replica in fleet.replicas:
            if replica.url and replica.state in (ReplicaPhase.READY, ReplicaPhase.DRAINING):
                by_model.setdefault(replica.model, []).append(replica)
        settling = at < self._epoch_began + SETTLE_S
        for served in self._served.values():
            served.snapshot_at = at if source == "controller" else 0.0
            if served.engine is EngineKind.EXTERNAL:
                continue
            replicas = by_model.get(served.name, [])
            if settling:
                listed = {replica.id for replica in replicas}
                replicas += [
                    handle.replica
                    for handle in served.handles
                    if handle.id not in listed and handle.answering and handle.open
                ]
            self._set_replicas(served, replicas, at)

    def layer_of(self, model: str, replica: str) -> LayerKey | None:
        """The layer of an external model's pod, if the controller scales it, and said so."""
        return self._layers.get((model, replica))

    def is_answering(self, model: str, url: str) -> bool:
        """Whether the server of ``model`` at ``url`` answered the last probe."""
        handle = self._at(model, url)
        return handle is not None and handle.answering

    def reads(self, model: str, url: str) -> int:
        """How many reads came from the server of ``model`` at ``url``; 0 if it is failing."""
        handle = self._at(model, url)
        return handle.reads if handle is not None and handle.answering and not handle.breaker.streak else 0

    def learns_bound(self, model: str, url: str) -> bool:
        """Whether the bound of the server of ``model`` at ``url`` is learned, and requests run there."""
        handle = self._at(model, url)
        return handle is not None and handle.limit is not None and handle.in_flight > 0

    def learn_bound(self, model: str, url: str, queue: ServerQueue | None) -> None:
        """Take what the server of ``model`` at ``url`` reports of its queue, if it does."""
        handle = self._at(model, url)
        if handle is not None:
            bound = handle.view.bound
            handle.learn_bound(queue)
            if handle.view.bound > bound:
                self.replica_changed(self._served[model])

    def set_external(
        self, name: str, servers: list[tuple[Replica, ServerAccess]], max_model_len: int | None
    ) -> None:
        """Follow the servers of an external model: those that serve it are ready."""
        served = self._served.get(name)
        if served is None or served.engine is not EngineKind.EXTERNAL:
            return
        served.max_model_len = max_model_len
        at = asyncio.get_running_loop().time()
        self._set_replicas(served, [replica for replica, _ in servers], at)
        for handle, (_, access) in zip(served.handles, servers, strict=True):
            handle.ask_by(access, self._caches)
            handle.open, handle.full = True, False
            handle.adapters.update(handle.replica.adapters, ())
            handle.view.timing = served.timings.get(handle.replica.shape)
            handle.set_answering(at, handle.replica.state is ReplicaPhase.READY)
        self.replica_changed(served)

    def close(self) -> None:
        for served in self._served.values():
            self._set_replicas(served, [], 0.0)

    def _at(self, model: str, url: str) -> ReplicaHandle | None:
        served = self._served.get(model)
        handles = served.handles if served is not None else []
        return next((handle for handle in handles if handle.url == url), None)

    def _of(self, name: str) -> ServedModel:
        served = self._served.get(name)
        if served is None:
            served = ServedModel(name, ReplicaHealth(self._metrics.model(name), self._draw))
            served.health.configure(self._eject, self._retry)
            self._served[name] = served
        return served

    def _drop_unknown(self) -> None:
        known = self._documented | {model.name for model in self.fleet.models}
        for name in [name for name in self._served if name not in known]:
            served = self._served.pop(name)
            served.removed = True
            self._set_replicas(served, [], 0.0)
            self._metrics.model(name).leave()
            self.unavailable(served)

    def _set_replicas(self, served: ServedModel, replicas: list[Replica], at: float) -> None:
        handles = {handle.id: handle for handle in served.handles}
        kept: list[ReplicaHandle] = []
        for replica in replicas:
            handle = handles.get(replica.id)
            if handle is not None and handle.url == replica.url:
                del handles[replica.id]
                if replica != handle.replica:
                    handle.become(replica, at)
            else:
                handle = self._open(served, replica)
                handle.lost_at = at
            kept.append(handle)
        for handle in handles.values():
            handle.close()
        served.leaving += handles.values()
        served.handles = kept
        self.replica_changed(served)

    def _open(self, served: ServedModel, replica: Replica) -> ReplicaHandle:
        secret = None if served.engine is EngineKind.EXTERNAL else self._secret
        handle = ReplicaHandle(
            replica, self._connect_timeout_s, secret, self._shared, served.health, events=self._events
        )
        if secret is not None:
            handle.subscribe(secret, lambda _: self.replica_changed(served), multiplexed=self._multiplexed)
        else:  # its id is its address, which is no client's business
            key = self._secret.encode()[: hashlib.blake2b.MAX_KEY_SIZE]
            digest = hashlib.blake2b(replica.id.encode(), digest_size=4, key=key).hexdigest()
            handle.label = f"{replica.model}-{digest}".encode()
        return handle

    def replica_changed(self, served: ServedModel) -> None:
        """A replica of ``served`` changed, and may have room for waiting requests."""
        if any(handle.admissible or handle.full for handle in served.handles):
            self._events.changed(served.name)

    def count_up(self) -> None:
        """Count the replicas that traffic may go to, for the metrics: seldom, as each line is a change."""
        for served in self._served.values():
            meter = self._metrics.model(served.name)
            meter.replicas_up = float(sum(each.admissible or each.full for each in served.handles))

    def unavailable(self, served: ServedModel) -> None:
        self._events.unavailable(served.name)

    def measure_round_trips(self) -> None:
        for handle in self._handles():
            handle.measure_round_trip()

    def scraped(self) -> list[ScrapedReplica]:
        """The replicas as a scrape sees them: external servers are not asked for metrics."""
        return [
            ScrapedReplica(handle.model, handle.id, handle.url, handle.round_trip_s)
            if handle.adapters.loads
            else ScrapedReplica(handle.model, handle.id, "", handle.round_trip_s, handle.replica)
            for handle in self._handles()
        ]

    def _handles(self) -> Iterator[ReplicaHandle]:
        return (handle for served in self._served.values() for handle in served.handles)

    def describe(self) -> dict[str, object]:
        """The snapshot with its age, and each replica as this worker sees it."""
        now = asyncio.get_running_loop().time()
        return {
            "source": self.source,
            "age_s": None if self.seen_at is None else round(now - self.seen_at, 3),
            "fleet": self.fleet,
            "replicas": [
                {
                    "id": handle.id,
                    "label": handle.label.decode(),
                    "model": handle.model,
                    "url": handle.url,
                    "admissible": handle.admissible,
                    "answering": handle.answering,
                    "open": handle.open,
                    "breaker": handle.breaker.state,
                    "state": handle.replica.state,
                    "shape": handle.replica.shape,
                    "mode": handle.replica.mode,
                    "generation": handle.replica.generation,
                    "reason": handle.replica.reason,
                    "in_flight": handle.in_flight,
                    "mine": handle.mine,
                    "pending_tokens": handle.look().pending_tokens,
                    "bound": handle.view.bound,
                    "contradicting_answers": handle.contradicting_answers,
                    "kv_events": None if handle.cache is None else handle.cache.state,
                    "adapters": sorted(handle.adapters.loaded),
                    "refused_adapters": sorted(handle.adapters.refusing),
                    "heard_s_ago": None if handle.reported_at is None else round(now - handle.reported_at, 3),
                }
                for handle in self._handles()
            ],
        }
