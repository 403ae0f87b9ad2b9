"""The replicas of one model in virtual time, in place of Ray Serve and the replica hosts.

Given a replica count per layer, it starts missing replicas and drains surplus ones, first those that do not
serve yet, then the youngest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from policy.config.deployment import ModelSpec
from policy.config.shared_gpus import gpu_group_of
from policy.engine.builtin_profiles import host_kv_tokens, shipped
from policy.engine.performance_model import Timing
from policy.hashing import hash_name
from policy.routing.cost import Candidate
from policy.routing.replica_health import HealthCounters, ReplicaHealth
from policy.scaling.reconcile_steps import Layer, LayerKey
from policy.scaling.start_times import StartTime, StartTimes
from policy.scaling.switch_cost import core_share, start_cores
from policy.scaling.view import Supply
from policy.types import Replica, ReplicaLoad, ReplicaPhase, StartPath
from policy.wire.controller_reports import EngineReport
from policy.wire.heartbeat import Heartbeat
from sim.simulator.engine import EngineJob, VirtualTimeEngine
from sim.simulator.fault_scenario import FaultScenario
from sim.simulator.replica import SimulatedReplica, SimulatedTicket
from sim.simulator.run_record import ReplicaLifetime

# A start that is spread is never shorter than this part of its mean.
_LEAST_START = 0.1
_WAKE_PART = 0.1


class Fleet:
    """One model's replicas; ``views`` are the ``serving`` ones as the router sees them.

    Since ``closing_since`` those of other layers than ``goal`` take what ends before they drain at
    ``closes_at``; all that runs there has to end by ``ends_at``. ``wake`` schedules an event of a replica:
    engine, ready or drain cut-off. ``lost`` is called with a replica that has ended.
    """

    def __init__(
        self,
        spec: ModelSpec,
        scenario: FaultScenario,
        spans: list[ReplicaLifetime],
        rng: random.Random,
        cores: float | None,
        *,
        wake: Callable[[float, str, SimulatedReplica, int], None],
        lost: Callable[[SimulatedReplica], None],
    ) -> None:
        """``cores`` are those of the machine, if known: engines that claim more in sum run slower."""
        self.spec = spec
        self._cores, self._core_share = math.inf if cores is None else cores, 1.0
        self.serving: list[SimulatedReplica] = []
        self.views: list[Candidate] = []
        self.starts = StartTimes()
        self.adapter_loads = self.preemptions = 0
        self.goal: LayerKey | None = None
        self.gives_way = False
        self.closing_since = self.closes_at = self.ends_at = math.inf
        self.health = ReplicaHealth(HealthCounters(), lambda: 0.5)
        self._lost = lost
        self._scenario = scenario
        self._spans = spans
        self._rng = rng
        self._wake = wake
        self._all: list[SimulatedReplica] = []
        self._wanted: dict[LayerKey, int] = {}
        self._seen: set[str] = set()
        self._timings: dict[str, Timing] = {name: shipped(spec, shape) for name, shape in spec.shapes.items()}
        self._modes = {mode.shape: name for name, mode in spec.modes.items()}
        group = gpu_group_of(spec)
        self._asleep = frozenset() if group is None else frozenset(group.engines)
        # The wake time of a sleeping replica is measured when it is created.
        wake_s = (self._start_s(StartPath.SLEEPING),)
        self.starts.restore(
            StartTime(model=spec.name, shape=shape, path=StartPath.SLEEPING, seconds=wake_s)
            for shape in self._asleep
        )

    def __iter__(self) -> Iterator[SimulatedReplica]:
        return iter(self._all)

    def timing(self, shape: str) -> Timing:
        return self._timings[shape]

    def sleeps(self, key: LayerKey) -> bool:
        """Whether the replicas of the layer are woken, and not started."""
        return key.shape in self._asleep

    def begin(self, key: LayerKey, count: int) -> None:
        self._wanted[key] = count
        self._seen.add(key.shape)
        for _ in range(count):
            runner = self._made(key, 0.0, StartPath.CACHED)
            runner.span.ready_at = 0.0
            runner.state = ReplicaPhase.READY
        self._changed(0.0)

    def scale(self, key: LayerKey, count: int, at: float) -> None:
        more = count - self._wanted.get(key, 0)
        self._wanted[key] = count
        self.starts.requested(key, more, at, more)
        self._start(key, more, at)
        if more < 0:
            mine = [runner for runner in self._all if runner.key == key and stays(runner)]
            mine.sort(key=lambda runner: (runner.state is ReplicaPhase.READY, -runner.span.number))
            for runner in mine[:-more]:
                self._drain(runner, at)
        self._changed(at)

    def ready(self, runner: SimulatedReplica, at: float) -> bool:
        """Its start has ended; returns whether it serves now."""
        if runner.state is not ReplicaPhase.STARTING:
            return False
        runner.state = ReplicaPhase.READY
        runner.span.ready_at = at
        self.starts.note(self._replica(runner, at), at)
        self._changed(at)
        return True

    def submit(self, runner: SimulatedReplica, place: SimulatedTicket, job: EngineJob, at: float) -> None:
        """Send a request there; raises :class:`ValueError` if it could never fit."""
        runner.engine.submit(job, at)
        runner.places[place.number] = place
        self.watch(runner)

    def watch(self, runner: SimulatedReplica) -> None:
        runner.version += 1
        self._wake(runner.engine.next_at(), "engine", runner, runner.version)

    def over(self, runner: SimulatedReplica, place: SimulatedTicket, at: float) -> bool:
        """A request has ended; returns whether that ended a draining replica."""
        runner.places.pop(place.number, None)
        if runner.state is ReplicaPhase.DRAINING and not runner.places:
            self._end(runner, at)
            return True
        return False

    def cut(self, runner: SimulatedReplica, at: float) -> list[SimulatedTicket]:
        """The drain timeout has passed; returns the requests that are cut off."""
        if runner.state is not ReplicaPhase.DRAINING or at < runner.leave_by:
            return []
        cut = list(runner.places.values())
        runner.places.clear()
        self._end(runner, at)
        return cut

    def crash(self, at: float) -> list[SimulatedTicket]:
        """Crash the longest-serving replica, which its host restarts; returns its requests."""
        if not self.serving:
            return []
        runner = self._longest()
        lost = list(runner.places.values())
        runner.places.clear()
        runner.engine.catch_up(at)
        runner.engine.crash()
        runner.span.crashed = True
        self._end(runner, at)
        self._start(runner.key, 1, at)
        return lost

    def slow(self, factor: float, at: float) -> SimulatedReplica | None:
        """Slow down the longest-serving replica; returns it."""
        if not self.serving:
            return None
        runner = self._longest()
        self.pace(runner, factor, at)
        return runner

    def _longest(self) -> SimulatedReplica:
        return min(self.serving, key=lambda each: (each.span.ready_at, each.span.number))

    def pace(self, runner: SimulatedReplica, factor: float, at: float) -> None:
        """Have its steps take ``factor`` times as long as its engine model says."""
        runner.slow = factor
        runner.engine.slow(factor / self._core_share, at)
        self.watch(runner)

    def layers(self) -> dict[LayerKey, Layer]:
        """Every layer that is wanted or has replicas."""
        keys = {key for key, count in self._wanted.items() if count} | {runner.key for runner in self._all}
        return {key: self.layer(key) for key in keys}

    def layer(self, key: LayerKey) -> Layer:
        states = [runner.state for runner in self._all if runner.key == key]
        return Layer(
            wanted=self._wanted.get(key, 0),
            starting=states.count(ReplicaPhase.STARTING),
            ready=states.count(ReplicaPhase.READY),
            draining=states.count(ReplicaPhase.DRAINING),
        )

    def supply(self, key: LayerKey, lead_s: float, at: float) -> Supply:
        starting = [
            self._replica(runner, at)
            for runner in self._all
            if runner.key == key and runner.state is ReplicaPhase.STARTING
        ]
        return self.starts.supply(self.layer(key), starting, lead_s, at)

    def beats(self, at: float) -> Iterator[Heartbeat]:
        for runner in self._all:
            engine = runner.engine
            engine.catch_up(at)
            report = EngineReport(preempted=engine.preempted, deferred=engine.slots.deferred)
            yield Heartbeat(replica=self._replica(runner, at), engine=report)

    def running_streams(self) -> tuple[int, int]:
        """The running requests that have produced tokens, and their tokens so far."""
        streams = [runner.engine.streams for runner in self._all]
        return sum(count for count, _ in streams), sum(tokens for _, tokens in streams)

    def slowness(self, name: str) -> float:
        """By what factor the steps of the replica of that id are slower than its engine model says."""
        slow = next((runner.slow for runner in self._all if runner.view.id == name), 1.0)
        return slow / self._core_share

    def _start(self, key: LayerKey, count: int, at: float) -> None:
        started = []
        for _ in range(count):
            path = StartPath.CACHED if key.shape in self._seen else StartPath.COLD
            path = StartPath.SLEEPING if self.sleeps(key) else path
            self._seen.add(key.shape)
            runner = self._made(key, at, path)
            self.starts.note(self._replica(runner, at), at)
            started.append(runner)
        self._changed(at)
        for runner in started:
            self._wake(at + self._start_s(runner.span.path) / self._core_share, "ready", runner, 0)

    def _start_s(self, path: StartPath) -> float:
        scenario, assumed_s = self._scenario, self.spec.control.assumed_start_s
        given = {
            StartPath.COLD: scenario.cold_s,
            StartPath.CACHED: scenario.cached_s,
            StartPath.SLEEPING: scenario.sleeping_s,
        }[path]
        if given is None:
            wake_s = self.spec.sim.wake_s
            asleep_s = _WAKE_PART * assumed_s if wake_s is None else wake_s
            given = asleep_s if path is StartPath.SLEEPING else assumed_s
        if scenario.spread:
            given = max(_LEAST_START * given, self._rng.gauss(given, scenario.spread * given))
        return given

    def _made(self, key: LayerKey, at: float, path: StartPath) -> SimulatedReplica:
        shape, number = self.spec.shapes[key.shape], len(self._spans)
        span = ReplicaLifetime(
            number=number,
            model=key.model,
            mode=self._modes.get(key.shape, ""),
            shape=key.shape,
            gpus=shape.gpus,
            cpus=shape.cpus,
            path=path,
            asked_at=at,
        )
        self._spans.append(span)
        timing, adapters = self._timings[key.shape], self.spec.adapters
        args = {**self.spec.engine_args, **shape.engine_args}
        engine = VirtualTimeEngine(
            timing,
            slots=0 if adapters is None else adapters.slots_per_replica,
            adapter_load_s=self._scenario.adapter_load_s,
            prefix_tokens=timing.limits.kv_tokens if args.get("enable_prefix_caching", True) else None,
            host_tokens=host_kv_tokens(args, self.spec.timed_by),
        )
        name = f"{key.model}-{key.shape}-{number}"
        view = Candidate(
            name, hash_name(name), bound=shape.max_in_flight or timing.limits.max_num_seqs, timing=timing
        )
        runner = SimulatedReplica(key, span, engine, view, self.health.join())
        self._all.append(runner)
        return runner

    def _drain(self, runner: SimulatedReplica, at: float) -> None:
        runner.span.leaves_at = at
        if runner.state is ReplicaPhase.STARTING or not runner.places:
            self._end(runner, at)
            return
        runner.state = ReplicaPhase.DRAINING
        runner.leave_by = max(at, min(at + self.spec.control.mode.drain_timeout_s, self.ends_at))
        self._wake(runner.leave_by, "cut", runner, 0)

    def _end(self, runner: SimulatedReplica, at: float) -> None:
        runner.state = ReplicaPhase.STOPPED
        runner.version += 1
        runner.span.ended_at = at
        self._write_down(runner, at)
        self._all.remove(runner)
        self.starts.note(self._replica(runner, at), at)
        self._changed(at)
        runner.breaker.reachable = False
        self.health.leave(runner.breaker)
        self._lost(runner)

    def close(self, at: float) -> None:
        """End the run: record the remaining replicas."""
        for runner in self._all:
            runner.span.ended_at = at
            self._write_down(runner, at)

    def _write_down(self, runner: SimulatedReplica, at: float) -> None:
        engine = runner.engine
        engine.catch_up(at)
        runner.span.busy_s, runner.span.tokens = engine.busy_s, engine.tokens
        self.adapter_loads += engine.adapter_loads
        self.preemptions += engine.preempted

    def _changed(self, at: float) -> None:
        self.serving = [runner for runner in self._all if runner.state is ReplicaPhase.READY]
        self.views = [runner.view for runner in self.serving]
        if self._cores == math.inf:
            return
        claimed = sum(
            start_cores(runner.span.cpus) if runner.state is ReplicaPhase.STARTING else runner.span.cpus
            for runner in self._all
        )
        share = core_share(self._cores, claimed)
        if share != self._core_share:
            self._core_share = share
            for runner in self._all:
                self.pace(runner, runner.slow, at)

    def _replica(self, runner: SimulatedReplica, at: float) -> Replica:
        span, engine = runner.span, runner.engine
        start_s = None if span.ready_at is None else span.ready_at - span.asked_at
        load = ReplicaLoad(
            at=at,
            in_flight=len(runner.places),
            bound=runner.view.bound,
            running=engine.running,
            waiting=engine.waiting,
            kv_used=engine.kv_used,
            tokens=engine.tokens,
            pending_tokens=engine.pending_tokens,
        )
        return Replica(
            id=runner.view.id,
            model=span.model,
            shape=span.shape,
            generation=runner.key.generation,
            state=runner.state,
            load=load,
            start_s=start_s or None,
            start_path=span.path,
        )


def stays(runner: SimulatedReplica) -> bool:
    return runner.state in (ReplicaPhase.STARTING, ReplicaPhase.READY)
