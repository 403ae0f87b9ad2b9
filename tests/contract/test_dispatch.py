"""The gateway and the simulator drive one dispatcher: the same events have the same outcomes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Protocol

import pytest

from gateway.protocol.errors import Refused
from gateway.queue.admission import Admission
from gateway.queue.model_queue import QueueTicket
from gateway.routing.fleet import ServedModel
from gateway.routing.model_routers import ModelRouters
from gateway.routing.replica_handle import ReplicaHandle
from gateway.telemetry.metrics import WorkerMetrics
from policy.admission.retry_policy import AttemptOutcome
from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.request import Request
from policy.scaling.reconcile_steps import LayerKey
from policy.types import Replica, ReplicaLoad, ReplicaPhase
from sim.arrivals import Arrival
from sim.simulator.fault_scenario import NO_FAULTS
from sim.simulator.fleet import Fleet
from sim.simulator.gateway import SimulatedGateway
from sim.simulator.replica import SimulatedReplica, SimulatedTicket
from sim.simulator.run_record import RequestOutcome

# An event: requests that arrive, a crash of the oldest replica, a replica that becomes ready, first tokens of
# all that run, the end of all that run.
Event = str | int
CRASH, READY, FIRST, END = "crash", "ready", "first tokens", "end"


class Driver(Protocol):
    """One replica runs at first, of ``bound`` slots; events follow each other at once."""

    async def play(self, event: Event) -> None: ...

    @property
    def outcomes(self) -> dict[str, int]: ...


def deployment(bound: int, max_queue: int) -> Deployment:
    shape = {"gpus": 1, "max_in_flight": bound}
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 8}}}
    model = {"name": "m", "engine": "sim", "sim": {"profile": "l4-8b"}, "shapes": {"small": shape}}
    document = {"models": [model | {"modes": modes}], "budget": {"gpus": 8}}
    return parse(document | {"gateway": {"max_queue": max_queue, "retry": {"budget": 0.0, "at_least": 0}}})


class Live:
    """The gateway's own admission and tickets; without transport."""

    def __init__(self, deployment: Deployment) -> None:
        (spec,) = deployment.models
        self.bound = spec.shapes["small"].max_in_flight
        self.served = ServedModel("m")
        self.served.health.configure(deployment.gateway.eject, deployment.gateway.retry)
        self.admission = Admission(
            WorkerMetrics(),
            ModelRouters(random.Random(1), deployment=lambda: deployment),  # noqa: S311
            lambda: deployment,
        )
        self.started = 0
        self.counts: Counter[str] = Counter()
        self.running: dict[QueueTicket, asyncio.Future[AttemptOutcome]] = {}
        self.first: set[QueueTicket] = set()
        self.clients: list[asyncio.Task[None]] = []
        self.clock = asyncio.get_running_loop().time

    async def play(self, event: Event) -> None:
        handles = self.served.handles
        if isinstance(event, int):
            self.clients += [asyncio.create_task(self._client()) for _ in range(event)]
        elif event == READY:
            self.started += 1
            replica = Replica(
                id=f"r{self.started}",
                model="m",
                shape="small",
                generation=1,
                state=ReplicaPhase.READY,
                load=ReplicaLoad(at=0.0, bound=self.bound),
                url="http://r:1",
            )
            handles.append(ReplicaHandle(replica, 1.0, None, health=self.served.health))
            handles[-1].set_answering(self.clock(), True)
            self.admission.replica_changed("m")
        elif event == CRASH:
            crashed = handles.pop(0)
            crashed.close()
            for ticket, ended in self.running.items():
                if ticket.replica is crashed:
                    begun = ticket in self.first
                    ended.set_result(AttemptOutcome.BROKEN if begun else AttemptOutcome.LOST)
        else:
            for ticket, ended in list(self.running.items()):
                if ticket not in self.first:
                    self.first.add(ticket)
                    ticket.first(self.clock())
                if event == END:
                    ended.set_result(AttemptOutcome.SERVED)
        await asyncio.sleep(0.01)

    @property
    def outcomes(self) -> dict[str, int]:
        return {**self.counts, **self.served.health.counters.retries}

    async def _client(self) -> None:
        now = self.clock()
        request = Request("m", prompt_tokens=100, output_tokens=20, size=400, arrived=now, deadline=now + 60)
        ticket = self.admission.ticket(self.served, request)
        try:
            while True:
                await ticket.wait()
                ticket.began(self.clock())
                ended = self.running[ticket] = asyncio.get_running_loop().create_future()
                outcome = await ended
                del self.running[ticket]
                tokens = (100, 20) if outcome is AttemptOutcome.SERVED else None
                ticket.end(self.clock(), outcome, tokens)
                if tokens is not None:
                    self.counts["served"] += 1
                    return
                if outcome is AttemptOutcome.BROKEN or ticket.rejection is not None:
                    self.counts["failed"] += 1
                    return
        except Refused:
            self.counts["refused"] += 1


class Simulated:
    """The simulator's gateway over its fleet; the engines do nothing."""

    def __init__(self, deployment: Deployment) -> None:
        (spec,) = deployment.models
        self.counts: Counter[str] = Counter()
        self.at = 0.0
        self.arrived = 0
        rng = random.Random(1)  # noqa: S311
        self.fleet = Fleet(
            spec, NO_FAULTS, [], rng, None, wake=lambda at, kind, runner, detail: None, lost=self._lost
        )
        self.gateway = SimulatedGateway(
            deployment, self.fleet, rng, over=self._over, queued_elsewhere=lambda: 0
        )
        self.key = LayerKey(model="m", shape="small", generation=1)
        self.wanted = 0

    async def play(self, event: Event) -> None:
        self.at += 0.01
        if isinstance(event, int):
            for _ in range(event):
                self.arrived += 1
                self.gateway.arrive(self.arrived, Arrival(self.at, 100, 20), self.at)
        elif event == READY:
            starting = [runner for runner in self.fleet if runner.state is ReplicaPhase.STARTING]
            if not starting:
                self.wanted += 1
                self.fleet.scale(self.key, self.wanted, self.at)
                starting = [runner for runner in self.fleet if runner.state is ReplicaPhase.STARTING]
            self.fleet.ready(starting[0], self.at)
        elif event == CRASH:
            for ticket in self.fleet.crash(self.at):
                self.gateway.broken(ticket, self.at)
        else:
            running = [ticket for runner in self.fleet for ticket in list(runner.places.values())]
            for ticket in running:
                if ticket.first_at is None:
                    self.gateway.first_token(ticket, self.at)
                if event == END:
                    assert ticket.runner is not None
                    self.fleet.over(ticket.runner, ticket, self.at)
                    self.gateway.ended(ticket, self.at)
        self.gateway.offer(self.at)

    @property
    def outcomes(self) -> dict[str, int]:
        return {**self.counts, **self.fleet.health.counters.retries}

    def _over(self, ticket: SimulatedTicket, outcome: RequestOutcome, at: float) -> None:
        self.counts[outcome.name.lower()] += 1

    def _lost(self, runner: SimulatedReplica) -> None:
        self.gateway.gone(runner)


@pytest.mark.parametrize("driver", [Live, Simulated])
@pytest.mark.parametrize(
    ("events", "bound", "outcomes"),
    [
        ([READY, READY, 40, END], 256, {"served": 40}),
        ([READY, READY, 40, CRASH, END], 256, {"served": 40, "free": 20}),
        ([READY, READY, 40, FIRST, CRASH, END], 256, {"served": 20, "failed": 20}),
        ([READY, 4, CRASH, READY, END], 256, {"served": 4, "free": 4}),
        ([READY, 4, CRASH, READY, CRASH], 256, {"failed": 4, "free": 4}),
        ([READY, READY, 4, CRASH, 2, CRASH, READY, END], 256, {"served": 4, "failed": 2, "free": 6}),
        ([READY, READY, 6, CRASH, *[END] * 4], 2, {"served": 6, "free": 2}),
        ([READY, 14, *[END] * 6], 2, {"served": 12, "refused": 2}),
    ],
    ids=[
        "no fault",
        "before the first token",
        "after the first token",
        "without another replica",
        "two deaths under each",
        "two deaths under some",
        "where no slot is free",
        "more than the queue holds",
    ],
)  # fmt: skip
async def test_gateway_and_simulator_dispatch_the_same_events_alike(
    driver: type[Live] | type[Simulated], events: list[Event], bound: int, outcomes: dict[str, int]
) -> None:
    played: Driver = driver(deployment(bound, max_queue=10 if bound < 10 else 100))
    for event in events:
        await played.play(event)
    assert played.outcomes == outcomes
