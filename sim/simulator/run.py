"""The simulator's run: a deployment replayed on a trace with the production decisions.

One queue of events in virtual time. A request: arrival -> gateway (admission, routing) -> replica's engine ->
first token -> last token. A decision: reports of gateways and replicas -> signals -> policies, guardrails,
modes -> counts -> replicas that start and drain. Equal arguments, ``seed`` included, give equal records.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from policy.adapter_placement.plan import PLAN_PERIOD_S
from policy.adapter_placement.types import PlacementHost
from policy.admission.provider_spend_cap import SpendCap, cost
from policy.config.deployment import Deployment, ModelSpec, ResourceBudget, Shape
from policy.config.shared_gpus import gpu_group_of
from policy.engine.builtin_profiles import kind_and_size, price_of
from policy.engine.power import PowerModel, power_model_of
from policy.routing.router import Router
from policy.scaling.view import Policy
from policy.signals.aggregator import SignalAggregator
from policy.types import ReplicaPhase
from policy.wire.controller_reports import GatewayReport
from policy.wire.heartbeat import HEARTBEAT_PERIOD_S
from policy.wire.load_stream import COALESCE_S
from sim.arrivals import Arrival
from sim.simulator.adapters import SimulatedPlacement
from sim.simulator.closed_loop import ClosedLoop
from sim.simulator.controller import SimulatedController
from sim.simulator.engine import TokenEventKind
from sim.simulator.fault_scenario import NO_FAULTS, FaultScenario
from sim.simulator.fleet import Fleet, stays
from sim.simulator.gateway import RouterFactory, SimulatedGateway
from sim.simulator.replica import SimulatedReplica, SimulatedTicket
from sim.simulator.request_log import RequestLog
from sim.simulator.run_record import HOUR_S, ModelTickSample, ReplicaLifetime, RequestOutcome, RunRecord
from sim.workload.per_model_load import ModelNames

# Period of the reports of gateways and replicas, and the opening of a trace that sizes the first fleet.
REPORT_PERIOD_S = 1.0
OPENING_S = 60.0
# Period of progress callbacks.
PROGRESS_EVERY_S = 10.0


def simulate(
    deployment: Deployment,
    policies: Mapping[str, Policy],
    trace: Iterable[Arrival],
    *,
    scenario: FaultScenario = NO_FAULTS,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    router: RouterFactory = Router,
) -> RunRecord:
    """Replay ``trace`` on ``deployment``, scaled by ``policies`` (by model), until all have ended.

    The fleet starts with what the first minute of the trace needs, or with the count of a fixed policy.
    ``progress`` gets the seconds of the trace replayed so far, ``router`` makes the routers. In a deployment
    of several models the trace must name them: raises :class:`policy.errors.ConfigError` for an unknown one.
    """
    return _Run(deployment, policies, scenario, seed, router).play(trace, progress or (lambda at: None))


class _Run:
    """One run and its clock."""

    def __init__(
        self, deployment: Deployment, policies: Mapping[str, Policy], scenario: FaultScenario, seed: int,
        router: RouterFactory,
    ) -> None:  # fmt: skip
        self._deployment = deployment
        self._scenario = scenario
        self._events: list[tuple[float, int, str, SimulatedReplica | str, int]] = []
        self._order = itertools.count()
        self._spans: list[ReplicaLifetime] = []
        self._aggregator = SignalAggregator()
        self._number = 0
        streams = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._fleets: dict[str, Fleet] = {}
        self._gateways: dict[str, SimulatedGateway] = {}
        self._ledgers: dict[str, RequestLog] = {}
        self._addressing = ModelNames([spec.name for spec in deployment.models])
        for spec in deployment.models:
            starts, routes = (random.Random(streams.getrandbits(64)) for _ in range(2))  # noqa: S311
            cpus = deployment.budget.cpus
            fleet = Fleet(spec, scenario, self._spans, starts, cpus, wake=self._push, lost=self._lost)
            elsewhere = partial(self._queued_elsewhere, spec.name)
            self._gateways[spec.name] = SimulatedGateway(
                deployment, fleet, routes, over=self._over, queued_elsewhere=elsewhere, router=router
            )
            self._fleets[spec.name] = fleet
            self._ledgers[spec.name] = RequestLog(spec.control)
        self._placements = {
            spec.name: SimulatedPlacement(scenario.adapter_load_s, self._gateways[spec.name].adapter_key)
            for spec in deployment.models
            if spec.adapters is not None
        }
        self._controller = SimulatedController(
            deployment, self._fleets, policies, self._aggregator, scenario.starts_at.timestamp()
        )
        self._spend_caps = {each.name: SpendCap(each.cost_cap_per_h) for each in deployment.upstreams}
        self._record = RunRecord(ends_at=0.0, requests={}, spans=self._spans)
        self._recent: dict[str, deque[tuple[float, bool]]] = {name: deque() for name in self._gateways}
        self._counted = dict.fromkeys(self._gateways, (0, 0.0))  # arrivals until the last sample, its instant
        self._looks: dict[str, float] = {}
        # The current slowdowns of each replica, by index in the scenario.
        self._slow: defaultdict[SimulatedReplica, list[int]] = defaultdict(list)
        self._open = 0

    def play(self, trace: Iterable[Arrival], progress: Callable[[float], None]) -> RunRecord:
        arrivals = self._arrivals = ClosedLoop(self._opened(iter(trace)))
        for crash in self._scenario.crashes:
            self._push(crash.at, "crash", crash.model or self._first, 0)
        for index, slow in enumerate(self._scenario.slow):
            self._push(slow.at, "slow", slow.model or self._first, index)
        self._push(REPORT_PERIOD_S, "report", "", 0)
        for name in self._placements:
            self._push(HEARTBEAT_PERIOD_S, "beat", name, 1)
        progress_at, at, events = 0.0, 0.0, self._events
        while self._open or not arrivals.over:
            if (sent_at := arrivals.next_at(events[0][0])) <= events[0][0]:
                at = max(at, sent_at)
                self._arrive(arrivals.pop(), at)
            else:
                at, _, kind, subject, detail = heapq.heappop(events)
                self._handle(kind, subject, detail, at)
            if at - progress_at >= PROGRESS_EVERY_S:
                progress_at = at
                progress(at)
        progress(at)
        return self._closed(at)

    @property
    def _first(self) -> str:
        return self._deployment.models[0].name

    def _opened(self, trace: Iterator[Arrival]) -> Iterator[Arrival]:
        """The trace, after its first minute has sized the fleet."""
        head: list[Arrival] = []
        rest = trace
        for arrival in trace:
            if arrival.at > OPENING_S:
                rest = itertools.chain((arrival,), trace)
                break
            head.append(arrival)
        rates: dict[str, float] = {}
        shapes: dict[str, tuple[float, float]] = {}
        lasted_s = OPENING_S if rest is not trace else max(1.0, head[-1].at if head else 0.0)
        for name in self._gateways:
            mine = [arrival for arrival in head if self._addressing.of(arrival) == name]
            rates[name] = len(mine) / lasted_s
            if mine:
                inputs = sum(arrival.input_tokens for arrival in mine)
                outputs = sum(arrival.output_tokens for arrival in mine)
                shapes[name] = inputs / len(mine), outputs / len(mine)
        self._controller.begin(rates, shapes)
        return itertools.chain(head, rest)

    def _push(self, at: float, kind: str, subject: SimulatedReplica | str, detail: int) -> None:
        if at < math.inf:
            heapq.heappush(self._events, (at, next(self._order), kind, subject, detail))

    def _arrive(self, arrival: Arrival, at: float) -> None:
        model = self._addressing.of(arrival)
        gateway = self._gateways[model]
        self._open += 1
        row = self._ledgers[model].arrived(at, arrival.input_tokens, arrival.output_tokens)
        gateway.arrive(row, arrival, at)
        if gateway.queued:
            self._look(model, gateway, at)
            if not self._controller.courses[model].count:
                self._decide_now(model, at)

    def _handle(self, kind: str, subject: SimulatedReplica | str, detail: int, at: float) -> None:
        if isinstance(subject, SimulatedReplica):
            self._of_replica(kind, subject, detail, at)
        elif kind == "report":
            self._report(at)
            self._push(at + REPORT_PERIOD_S, "report", "", 0)
        elif kind == "look":
            self._looks.pop(subject, None)
            gateway = self._gateways[subject]
            gateway.expire(at)
            gateway.offer(at)
            self._look(subject, gateway, at)
        elif kind == "beat":
            self._place(subject, detail, at)
            self._push(at + HEARTBEAT_PERIOD_S, "beat", subject, detail + 1)
        elif kind == "crash":
            gateway = self._gateways[subject]
            for place in self._fleets[subject].crash(at):
                gateway.broken(place, at)
            self._decide_now(subject, at)
            self._look(subject, gateway, at)
        elif kind == "slow":
            slow = self._scenario.slow[detail]
            runner = self._fleets[subject].slow(slow.factor, at)
            if runner is not None:
                self._slow[runner].append(detail)
                self._pace(runner, at)
                self._push(slow.until, "pace", runner, detail)

    def _of_replica(self, kind: str, runner: SimulatedReplica, detail: int, at: float) -> None:
        model = runner.key.model
        fleet, gateway = self._fleets[model], self._gateways[model]
        if kind == "engine" and detail == runner.version:
            self._advance(runner, fleet, gateway, at)
        elif kind == "ready" and fleet.ready(runner, at):
            self._controller.act(at)
            gateway.offer(at)
        elif kind == "cut":
            for place in fleet.cut(runner, at):
                gateway.broken(place, at)
            self._controller.act(at)
        elif kind == "line" and runner.state is not ReplicaPhase.STOPPED:
            runner.engine.catch_up(at)
            gateway.adapters_reported(runner)
        elif kind == "pace" and runner.state is not ReplicaPhase.STOPPED:
            self._slow[runner].remove(detail)
            self._pace(runner, at)
        if gateway.queued:
            self._look(model, gateway, at)

    def _lost(self, runner: SimulatedReplica) -> None:
        self._gateways[runner.key.model].gone(runner)

    def _queued_elsewhere(self, model: str) -> int:
        return sum(
            [gateway.dispatcher.queue.size for name, gateway in self._gateways.items() if name != model]
        )

    def _pace(self, runner: SimulatedReplica, at: float) -> None:
        factor = math.prod(self._scenario.slow[i].factor for i in self._slow[runner])
        self._fleets[runner.key.model].pace(runner, factor, at)

    def _advance(self, runner: SimulatedReplica, fleet: Fleet, gateway: SimulatedGateway, at: float) -> None:
        freed = False
        for event in runner.engine.advance(at):
            place = runner.places[event.number]
            if event.kind is TokenEventKind.FIRST:
                place.cached_tokens = event.cached_tokens
                gateway.first_token(place, event.at)
            else:
                gone = fleet.over(runner, place, event.at)
                gateway.ended(place, event.at)
                freed = True
                if gone:
                    self._controller.act(at)
        gateway.reported(runner, at)
        if runner.reported != runner.engine.adapter_changes:
            runner.reported = runner.engine.adapter_changes
            self._push(at + COALESCE_S, "line", runner, 0)
        if runner.state is not ReplicaPhase.STOPPED:
            fleet.watch(runner)
        if freed and gateway.queued:
            gateway.offer(at)

    def _look(self, model: str, gateway: SimulatedGateway, at: float) -> None:
        due = gateway.dispatcher.due_at(at)
        if due < self._looks.get(model, math.inf):
            self._looks[model] = due
            self._push(due, "look", model, 0)

    def _over(self, place: SimulatedTicket, outcome: RequestOutcome, at: float) -> None:
        """A request has ended in the fleet: served, spilled over, or failed."""
        self._open -= 1
        model = place.request.model
        if outcome in (RequestOutcome.REFUSED, RequestOutcome.EXPIRED) and self._spills(model, place, at):
            outcome = RequestOutcome.SPILLED_OVER
        self._recent[model].append((at, self._ledgers[model].over(place.number, place, outcome, at)))
        self._arrivals.ended(place.arrival.session, at)

    def _spills(self, model: str, place: SimulatedTicket, at: float) -> bool:
        """Whether a fallback provider takes it within its spend cap."""
        for upstream in self._deployment.upstreams:
            if model in upstream.models:
                price = cost(upstream.price, place.arrival.input_tokens, place.arrival.output_tokens)
                spend_cap = self._spend_caps[upstream.name]
                if (hold := spend_cap.hold(price, at)) is not None:
                    spend_cap.settle(hold, price, at)
                    self._record.spillover_cost += price
                    return True
        return False

    def _report(self, at: float) -> None:
        """Gateways and replicas report; then the models whose tick is due decide."""
        self._number += 1
        reports = {name: gateway.report(at) for name, gateway in self._gateways.items()}
        report = GatewayReport(worker="simulator", number=self._number, since_s=at, models=reports)
        self._aggregator.take(report, at)
        for fleet in self._fleets.values():
            for beat in fleet.beats(at):
                self._aggregator.take_beat(beat, at)
        self._controller.act(at)
        due = self._controller.due(at)
        if due:
            self._decide(due, at)
            for name in sorted(due):
                self._record.moments.append(self._moment(name, at))

    def _place(self, model: str, beat: int, at: float) -> None:
        """Replicas report the use of their adapters and receive the last plan."""
        placement, fleet = self._placements[model], self._fleets[model]
        if not beat % round(PLAN_PERIOD_S / HEARTBEAT_PERIOD_S):
            placement.replan((self._host(runner, at) for runner in fleet if stays(runner)), at)
        for runner in fleet.serving:
            placement.beat(runner.view.id, runner.engine.slots, len(runner.places), at)
            runner.engine.look_ahead(at)
            fleet.watch(runner)

    def _host(self, runner: SimulatedReplica, at: float) -> PlacementHost:
        adapters = self._fleets[runner.key.model].spec.adapters
        assert adapters is not None
        runner.engine.catch_up(at)
        return PlacementHost(
            id=runner.view.id,
            key=runner.view.key,
            slots=adapters.slots_per_replica,
            seats=float(runner.view.bound),
            resident=frozenset(runner.engine.slots.loaded),
        )

    def _decide_now(self, model: str, at: float) -> None:
        self._decide(self._controller.due(at, frozenset({model})), at)

    def _decide(self, models: frozenset[str], at: float) -> None:
        self._controller.decide(models, at)
        for name, gateway in self._gateways.items():
            if gateway.queued:
                self._look(name, gateway, at)

    def _moment(self, name: str, at: float) -> ModelTickSample:
        gateway, course = self._gateways[name], self._controller.courses[name]
        states, recent = [runner.state for runner in self._fleets[name]], self._recent[name]
        while recent and recent[0][0] < at - 60.0:
            recent.popleft()
        arrived, (before, before_at) = gateway.totals.arrived, self._counted[name]
        self._counted[name] = arrived, at
        return ModelTickSample(
            at=at,
            model=name,
            arrivals=(arrived - before) / (at - before_at),
            queued=gateway.queued,
            running=gateway.in_flight - gateway.queued,
            ready=states.count(ReplicaPhase.READY),
            starting=states.count(ReplicaPhase.STARTING),
            draining=states.count(ReplicaPhase.DRAINING),
            mode=course.mode,
            wanted=course.count,
            met=sum(met for _, met in recent) / len(recent) if recent else 1.0,
        )

    def _closed(self, at: float) -> RunRecord:
        record, budget = self._record, self._deployment.budget
        gpus = any(shape.gpus for spec in self._deployment.models for shape in spec.shapes.values())
        for fleet in self._fleets.values():
            fleet.close(at)
        record.ends_at = at
        record.decisions, record.switches = self._controller.decisions, self._controller.switches
        record.adapter_loads = sum(fleet.adapter_loads for fleet in self._fleets.values())
        record.preemptions = sum(fleet.preemptions for fleet in self._fleets.values())
        groups = {
            spec.name: group for spec in self._deployment.models if (group := gpu_group_of(spec)) is not None
        }
        for name, group in groups.items():
            spec = self._deployment.model(name)
            shape = spec.shapes[group.shape]
            record.gpu_s += at * group.gpus
            record.cost += at / HOUR_S * group.engines[group.shape] * price_of(shape, budget)
            record.joules += at * group.gpus * _draw(spec, shape, budget).watts(0.0)
        for span in self._spans:
            spec = self._deployment.model(span.model)
            shape = spec.shapes[span.shape]
            draw, devices = _draw(spec, shape, budget), shape.gpus or shape.cpus
            held_s = (at if span.ended_at is None else span.ended_at) - span.asked_at
            if span.model in groups and span.shape in groups[span.model].engines:
                # The idle power of a shared GPU group is counted once, above.
                span.joules = devices * span.busy_s * (draw.watts(1.0) - draw.watts(0.0))
            else:
                span.joules = devices * held_s * draw.watts(span.busy_s / held_s if held_s else 0.0)
                record.gpu_s += held_s * (shape.gpus if gpus else shape.cpus)
                record.cost += held_s / HOUR_S * price_of(shape, budget)
            record.joules += span.joules
        record.requests = {name: ledger.requests() for name, ledger in self._ledgers.items()}
        return record


def _draw(spec: ModelSpec, shape: Shape, budget: ResourceBudget) -> PowerModel:
    """The power model of one device: that of the profile's GPU type, else the budget's."""
    if not shape.gpus:
        return power_model_of("cpu", budget.cpu_watts)
    kind, _ = kind_and_size(spec.timed_by or "")
    return power_model_of(kind, budget.gpu_watts)
