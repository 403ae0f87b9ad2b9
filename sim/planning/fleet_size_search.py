"""Trials of fixed-size fleets on the load in the simulator, and the search for the fewest replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from policy.config.deployment import (
    Deployment,
    FallbackProviderConfig,
    ModelSpec,
    ProviderPrice,
    ResourceBudget,
)
from policy.engine.builtin_profiles import max_request_tokens, shipped
from policy.engine.performance_model import Timing
from policy.engine.replica_capacity import capability
from policy.scaling.policies.static import Static
from sim.planning.candidates import ShapeCandidate
from sim.planning.demand import Arrivals, WorkloadDemand, met_alone
from sim.simulator.fault_scenario import NO_FAULTS, CrashFault, FaultScenario
from sim.simulator.run import simulate
from sim.simulator.run_record import HOUR_S, RequestColumns, RequestOutcome, RunRecord, finite_quantiles

# Counts below the least one that are tried too: near the SLO more replicas may do worse by chance.
DEPTH = 2


def fewest(meets: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The least count from 1 to ``most`` that ``meets``; ``None`` where ``most`` itself does not.

    Strides from ``guess``, doubling, until one count meets and a lower one does not, then bisects. The
    :data:`DEPTH` counts below the result do not meet, so the result is that of trying all counts from 1 up
    even where a count above it misses by chance.
    """
    known: dict[int, bool] = {}

    def tried(count: int) -> bool:
        if count not in known:
            known[count] = meets(count)
        return known[count]

    low, high = _bracket(tried, max(1, min(guess, most)), most)
    if high is None:
        return None
    while True:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if tried(middle) else (middle, high)
        below = [count for count in range(max(1, high - DEPTH), high) if tried(count)]
        if not below:
            return high
        high = below[0]
        low = max((count for count, met in known.items() if not met and count < high), default=0)


def _bracket(tried: Callable[[int], bool], guess: int, most: int) -> tuple[int, int | None]:
    """A count that does not meet (or 0) and a larger one that does, in strides that double."""
    stride, at = 1, guess
    if tried(at):
        while at > 1:
            below = max(1, at - stride)
            if not tried(below):
                return below, at
            at, stride = below, 2 * stride
        return 0, at
    while at < most:
        above = min(most, at + stride)
        if tried(above):
            return at, above
        at, stride = above, 2 * stride
    return at, None


# Seconds after the busiest minute began: by then the crashing replica has requests.
CRASH_AFTER_S = 10.0


class FleetRunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run.

    ``attainment`` is the fraction of requests within the SLO, ``busy`` the fraction of time in which a
    replica had steps to run. ``tokens_per_s`` counts prompts and answers; ``streams`` is the peak of open
    requests.
    """

    attainment: float
    ttft_p95_s: float | None
    itl_p95_s: float | None
    busy: float
    tokens_per_s: float
    streams: int


class SpilloverResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a fallback provider served in one run: its share of requests, tokens per hour and cost per hour.

    ``served_within`` is the fraction within the SLO of the requests that the fleet kept, with at most
    ``bound`` requests at once per replica.
    """

    bound: int
    share: float
    input_tokens_per_h: float
    output_tokens_per_h: float
    cost_per_h: float
    served_within: float


class OutageResult(msgspec.Struct, frozen=True, kw_only=True):
    """Attainment while a replica may be away, and how many answers were ``cut`` off."""

    attainment: float
    cut: int


@dataclass(eq=False)
class FleetRuns:
    """Runs of one model's load on fleets of fixed size; each is run once and cached.

    ``progress`` gets what is tried, and the simulated seconds so far and in all.
    """

    deployment: Deployment
    spec: ModelSpec
    arrivals: Arrivals
    demand: WorkloadDemand
    seed: int
    progress: Callable[[str, float, float], None]
    _tried: dict[tuple[str, int, float], FleetRunResult] = field(default_factory=dict)

    def tried(self, candidate: ShapeCandidate, count: int, factor: float = 1.0) -> FleetRunResult:
        """``count`` replicas at ``factor`` times the load."""
        key = candidate.name, count, factor
        if key not in self._tried:
            self._tried[key] = _of(self._run(candidate, count, factor), self.spec.name, count)
        return self._tried[key]

    def meets(self, candidate: ShapeCandidate, count: int, factor: float = 1.0) -> bool:
        return self.tried(candidate, count, factor).attainment >= self.spec.control.slo.attainment

    def could(self, candidate: ShapeCandidate) -> bool:
        """Whether any count could meet the SLO: whether requests would if each were alone."""
        timing = self._timing(candidate)
        assert timing.model is not None
        slo, most = self.spec.control.slo, max_request_tokens(candidate.of(self.spec, 1), candidate.shape)
        return met_alone(self.arrivals(1.0), timing.model, timing.limits, slo, most) >= slo.attainment

    def guess(self, candidate: ShapeCandidate, factor: float = 1.0) -> int:
        """A replica count to start the search at, by the engine model for the busiest minute."""
        load = self.demand.workload(factor)
        able = capability(self._timing(candidate), load, self.spec.control.slo)
        rate = able.mu or able.mu_max
        return max(1, round(load.lam / rate)) if rate else 1

    def outage(self, candidate: ShapeCandidate, count: int, *, crash: bool) -> OutageResult:
        """A start-up time from the busiest minute on; with a ``crash`` one replica is away in it."""
        at, away_s = self.demand.busiest_s + CRASH_AFTER_S, self.spec.control.assumed_start_s
        crashes = (CrashFault(at=at, model=self.spec.name),) if crash else ()
        requests = self._run(candidate, count, 1.0, scenario=FaultScenario(crashes=crashes)).requests[
            self.spec.name
        ]
        failed = requests.outcome == RequestOutcome.FAILED
        during = (requests.at >= at) & (requests.at < at + away_s)
        return OutageResult(
            attainment=float(np.mean(requests.met[during])) if during.any() else 1.0,
            # Others fail before they have a token, as those that fit into no replica.
            cut=int(np.count_nonzero(failed & np.isfinite(requests.ttft_s))),
        )

    def spillover(
        self, candidate: ShapeCandidate, count: int, price: ProviderPrice, guess: int
    ) -> SpilloverResult | None:
        """``count`` replicas, with a fallback provider of that price for the requests that they reject.

        The concurrency limit of a replica is the largest that keeps the requests it serves within the SLO, at
        most the configured one; the search starts near ``guess``. ``None`` where no limit does.
        """
        if not count:
            return self._all_bought(price)
        most = self._bound(candidate)
        if self.meets(candidate, count):
            return self._spilled_over(candidate, count, price, most)
        bounds: dict[int, SpilloverResult] = {}

        def misses(bound: int) -> bool:
            bounds[bound] = found = self._spilled_over(candidate, count, price, bound)
            return found.served_within < self.spec.control.slo.attainment

        least = fewest(misses, guess, most)
        return bounds.get(most if least is None else least - 1)

    def _spilled_over(
        self, candidate: ShapeCandidate, count: int, price: ProviderPrice, bound: int
    ) -> SpilloverResult:
        """The run with at most ``bound`` requests at once per replica."""
        shape = msgspec.structs.replace(candidate.shape, max_in_flight=bound)
        candidate = msgspec.structs.replace(candidate, shape=shape)
        models = {self.spec.name: ""}
        upstream = FallbackProviderConfig(
            name="spillover", url="", models=models, price=price, cost_cap_per_h=float("inf")
        )
        record = self._run(candidate, count, 1.0, upstreams=(upstream,))
        requests = record.requests[self.spec.name]
        gone = requests.outcome == RequestOutcome.SPILLED_OVER
        per_h = HOUR_S / self.demand.lasts_s
        return SpilloverResult(
            bound=bound,
            share=float(np.mean(gone)),
            input_tokens_per_h=float(requests.input_tokens[gone].sum()) * per_h,
            output_tokens_per_h=float(requests.output_tokens[gone].sum()) * per_h,
            cost_per_h=record.spillover_cost * per_h,
            served_within=float(np.mean(requests.met[~gone])) if not gone.all() else 0.0,
        )

    def _all_bought(self, price: ProviderPrice) -> SpilloverResult:
        per_h = self.demand.rps * HOUR_S
        inputs, outputs = self.demand.input_tokens * per_h, self.demand.output_tokens * per_h
        return SpilloverResult(
            bound=0,
            share=1.0,
            input_tokens_per_h=inputs,
            output_tokens_per_h=outputs,
            cost_per_h=(price.input * inputs + price.output * outputs) / 1e6,
            served_within=0.0,
        )

    def _bound(self, candidate: ShapeCandidate) -> int:
        """The configured concurrency limit of a replica, or that of its engine."""
        return candidate.shape.max_in_flight or self._timing(candidate).limits.max_num_seqs

    def _timing(self, candidate: ShapeCandidate) -> Timing:
        return shipped(candidate.of(self.spec, 1), candidate.shape)

    def _run(
        self,
        candidate: ShapeCandidate,
        count: int,
        factor: float,
        *,
        scenario: FaultScenario = NO_FAULTS,
        upstreams: tuple[FallbackProviderConfig, ...] = (),
    ) -> RunRecord:
        model = candidate.of(self.spec, count)
        document, budget = self.deployment, ResourceBudget()
        fixed = msgspec.structs.replace(document, models=(model,), budget=budget, upstreams=upstreams)
        what, ends_at = f"{count} of {candidate.name}", self.demand.lasts_s / factor
        if factor != 1.0:
            what += f", load x {factor:g}"
        if upstreams:
            what += f", {self._bound(candidate)} at once"
        self.progress(what, 0.0, ends_at)
        return simulate(
            fixed,
            {model.name: Static()},
            self.arrivals(factor),
            scenario=scenario,
            seed=self.seed,
            progress=lambda at: self.progress(what, at, ends_at),
        )


def _of(record: RunRecord, model: str, count: int) -> FleetRunResult:
    requests = record.requests[model]
    served = requests.outcome == RequestOutcome.SERVED
    tokens = int(requests.input_tokens[served].sum() + requests.output_tokens[served].sum())
    ends_at = max(record.ends_at, 1e-9)
    return FleetRunResult(
        attainment=float(np.mean(requests.met)),
        ttft_p95_s=finite_quantiles(requests.ttft_s[served], (0.95,))[0],
        itl_p95_s=finite_quantiles(requests.itl_s[served], (0.95,))[0],
        busy=min(1.0, sum(span.busy_s for span in record.spans) / (count * ends_at)),
        tokens_per_s=tokens / ends_at,
        streams=_most_open(requests),
    )


def _most_open(requests: RequestColumns) -> int:
    """The peak number of served requests that were open at once."""
    served = requests.outcome == RequestOutcome.SERVED
    came = requests.at[served]
    order = np.argsort(np.concatenate([came, came + requests.e2e_s[served]]), kind="stable")
    # The first half of the instants are arrivals.
    return int(np.cumsum(np.where(order < len(came), 1, -1)).max(initial=0))
