"""Invariants of every policy for any view."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.config.control import SloConfig
from policy.engine.replica_capacity import Capability
from policy.scaling.policies.registry import choose, make
from policy.scaling.policies.target_tracking import TargetMetric
from policy.scaling.view import Policy, Proposal, Supply, View
from policy.signals.types import LatencyQuantiles, ModelDemand, Rates, ReplicaSample, Signals

CHOICES: list[Any] = [
    "static",
    {"static": {"replicas": 3}},
    "panic_window",
    "token_saturation",
    "predictive",
    {"predictive": {"down": 0.8, "quantile": 0.5}},
    *({"target_tracking": {"metric": str(metric)}} for metric in TargetMetric),
]
IDS = [str(choice) for choice in CHOICES]

pytestmark = pytest.mark.slow

finite = st.floats(allow_nan=False, allow_infinity=False)
amounts = st.floats(0.0, 1e308)
counts = st.integers(0, 2**53)
few = st.integers(0, 40)


def views(amount: st.SearchStrategy[float], least: int = 0) -> st.SearchStrategy[View]:
    """Views of any figures, consistent or not."""

    @st.composite
    def drawn(draw: st.DrawFn) -> View:
        a, b, c, d, e, f, g = (draw(amount) for _ in range(7))
        queued, waiting, serving, count = draw(counts), draw(counts), draw(few), draw(few)
        demand = ModelDemand(
            age_s=a,
            arrivals=Rates(last_6_s=a, last_20_s=b, last_60_s=c, last_600_s=d),
            refused=Rates(last_6_s=0.0, last_20_s=0.0, last_60_s=0.0, last_600_s=0.0),
            concurrency=Rates(last_6_s=d, last_20_s=a, last_60_s=b, last_600_s=c),
            queued=queued,
            ttft=draw(st.none() | st.just(LatencyQuantiles(count=queued, p50=c, p90=c, p95=e, p99=f))),
            input_tokens=f,
            output_tokens=g,
        )
        figures = tuple(
            ReplicaSample(
                id="r", age_s=1.0, waiting=waiting, kv_used=used, tokens_per_s=b, deferred=serving, slowness=e
            )
            for used in draw(st.lists(amount, max_size=3))
        )
        return View(
            at=draw(st.floats(-1e308, 1e308) | st.floats(1e9, 1e9 + 600)),
            tick_s=5.0,
            model="m",
            mode=draw(st.sampled_from(["single-large", "multi-replica"])),
            count=count,
            least=draw(st.integers(least, 3)),
            most=draw(st.integers(3, 64)),
            supply=Supply(
                wanted=count, serving=serving, starting_s=draw(st.sampled_from([(), (c,), (d, e)]))
            ),
            signals=Signals(demand=draw(st.just(demand) | st.none()), replicas=figures),
            capability=Capability(mu=e, mu_max=draw(amount), kv_tokens=waiting, error=c),
            lead_s=f,
            slo=draw(st.sampled_from([SloConfig(), SloConfig(ttft_p95_s=1.0)])),
        )

    return drawn()


def memory_after(policy: Policy, seen: list[View]) -> Any:
    memory: Any = None
    for view in seen:
        memory = policy.decide(view, memory).memory
    return memory


@pytest.mark.parametrize("choice", CHOICES, ids=IDS)
@given(st.lists(views(finite) | views(amounts), min_size=1, max_size=4))
@settings(max_examples=80)
def test_proposals_are_finite_bounded_and_the_same_after_json(choice: Any, seen: list[View]) -> None:
    """Bit for bit; neither the view nor the memory is changed, and nothing is NaN or infinite."""
    policy = make(choose("policy", choice))
    memory: Any = None
    for view in seen:
        written = msgspec.json.encode((view, memory))
        proposal = policy.decide(view, memory)
        assert msgspec.json.encode((view, memory)) == written
        again, remembered = msgspec.json.decode(written, type=tuple[View, Any])
        repeated = make(choose("policy", choice)).decide(again, remembered)
        assert repeated == proposal == msgspec.json.decode(msgspec.json.encode(proposal), type=Proposal)
        if view.signals.demand is not None and proposal.count != view.count:
            assert view.least <= proposal.count <= view.most
        assert proposal.count >= 0
        assert "null" not in msgspec.json.encode([proposal.terms, proposal.memory or 0]).decode()
        for rate in (proposal.forecast, proposal.forecast_high):
            assert rate is None or 0.0 <= rate < 1e12
        memory = proposal.memory
    assert len(msgspec.json.encode(memory)) < 4000


@pytest.mark.parametrize("choice", CHOICES, ids=IDS)
@given(st.lists(views(amounts), max_size=3), views(amounts))
@settings(max_examples=40)
def test_without_signals_count_and_memory_stay(choice: Any, seen: list[View], view: View) -> None:
    policy = make(choose("policy", choice))
    memory = memory_after(policy, seen)
    without_signals = msgspec.structs.replace(view, signals=Signals())
    proposal = policy.decide(without_signals, memory)
    if "static" not in str(choice):
        assert proposal.count == view.count
    assert msgspec.json.encode(proposal.memory) == msgspec.json.encode(memory)


loads = st.floats(0.0, 1e4)
more = st.floats(0.0, 1e4)


@pytest.mark.parametrize("choice", CHOICES, ids=IDS)
@given(st.lists(views(loads, least=1), max_size=3), views(loads, least=1), more, st.integers(0, 1000))
@settings(max_examples=60)
def test_count_grows_with_load(choice: Any, seen: list[View], view: View, extra: float, waiting: int) -> None:
    """For the same state and memory: more arrivals and waiting requests, fuller caches, higher TTFT."""
    policy = make(choose("policy", choice))
    memory = memory_after(policy, seen)
    demand = view.signals.demand
    if demand is None:
        return

    def raised(rates: Rates) -> Rates:
        return Rates(**{name: value + extra for name, value in msgspec.structs.asdict(rates).items()})

    heavier = msgspec.structs.replace(
        demand,
        arrivals=raised(demand.arrivals),
        concurrency=raised(demand.concurrency),
        queued=demand.queued + waiting,
        ttft=demand.ttft and msgspec.structs.replace(demand.ttft, p95=demand.ttft.p95 + extra),
    )
    figures = tuple(
        msgspec.structs.replace(
            each,
            waiting=each.waiting + waiting,
            kv_used=each.kv_used + extra / 1e4,
            tokens_per_s=each.tokens_per_s + extra,
        )
        for each in view.signals.replicas
    )
    loaded = msgspec.structs.replace(view, signals=Signals(demand=heavier, replicas=figures))
    assert policy.decide(loaded, memory).count >= policy.decide(view, memory).count


@pytest.mark.parametrize("choice", CHOICES, ids=IDS)
@given(st.sampled_from(CHOICES), views(amounts), views(amounts))
@settings(max_examples=20)
def test_the_memory_of_another_policy_is_ignored(choice: Any, other: Any, before: View, view: View) -> None:
    """The policy was changed in the document between two decisions."""
    if choose("policy", choice).name == choose("policy", other).name:
        return
    memory = make(choose("policy", other)).decide(before, None).memory
    policy = make(choose("policy", choice))
    assert policy.decide(view, memory) == policy.decide(view, None)
