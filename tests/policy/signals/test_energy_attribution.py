"""The energy of GPUs goes to the adapters whose tokens were computed meanwhile, and none is lost."""

from __future__ import annotations

import msgspec
import pytest

from policy.signals import energy_attribution
from policy.signals.aggregator import SignalAggregator
from policy.signals.energy_attribution import BASE, IDLE, INTERVAL_S, OTHERS, EnergyAttribution
from policy.types import Replica, ReplicaLoad, ReplicaPhase
from policy.wire.controller_reports import GatewayReport, GpuReport, ModelReport
from policy.wire.heartbeat import Heartbeat

T = 1000.0


def replica(name: str = "r", **over: object) -> Replica:
    made = Replica(
        id=name, model="m", shape="s", generation=1, state=ReplicaPhase.READY, load=ReplicaLoad(at=0.0)
    )
    return msgspec.structs.replace(made, **over)


def test_reports_and_heartbeats_become_joules_by_adapter() -> None:
    aggregator = SignalAggregator()

    def beat(name: str, joules: float, at: float) -> None:
        gpus = GpuReport(watts=300.0, joules=joules)
        aggregator.take_beat(Heartbeat(replica=replica(name), gpus=gpus), at)

    def report(number: int, at: float, **totals: int | dict[str, int]) -> None:
        models = {"m": ModelReport(**totals)}  # type: ignore[arg-type]
        aggregator.take(GatewayReport(worker="w", number=number, since_s=at - T, models=models), at)

    for name, joules in (("a", 5000.0), ("b", 100.0)):  # the counters began long before
        beat(name, joules, T)
    report(1, T + 10, input_tokens=100, cached_tokens=60, output_tokens=20, adapter_tokens={"sql": 15})
    report(2, T + 30, input_tokens=200, cached_tokens=120, output_tokens=40, adapter_tokens={"sql": 30})
    beat("a", 5900.0, T + 50)
    beat("b", 400.0, T + INTERVAL_S)
    assert aggregator.energy.joules == {("m", "sql"): 300.0, ("m", BASE): 900.0}
    assert aggregator.energy.tokens == {("m", "sql"): 30, ("m", BASE): 90}
    beat("a", 6000.0, T + 70)
    beat("a", 6500.0, T + 70 + INTERVAL_S)
    assert aggregator.energy.joules["m", IDLE] == 600.0


def test_a_counter_that_begins_again_and_gpus_that_others_use_count_nothing() -> None:
    meter = EnergyAttribution()
    asleep = replica(state=ReplicaPhase.ASLEEP)
    for each, joules in ((replica(), 9000.0), (replica(), 10.0), (asleep, 700.0), (replica(), 750.0)):
        meter.spent(each, joules, T)
    meter.forget("r")
    meter.spent(replica(), 4000.0, T + INTERVAL_S)
    assert meter.joules == {("m", IDLE): 50.0}


def test_a_counter_that_begins_to_include_a_gpu_counts_nothing_and_goes_on_from_there() -> None:
    meter = EnergyAttribution()
    # The second GPU answers from the third report on, with all that it took since its driver was loaded.
    for joules, after_s in ((9e8, 0.0), (9e8 + 500.0, 1.0), (18e8, 2.0), (18e8 + 60e3, INTERVAL_S)):
        meter.spent(replica(), joules, T + after_s)
    assert meter.joules == {("m", IDLE): 500.0 + 60e3}


def test_the_number_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_attribution, "MOST", 1)
    meter = EnergyAttribution()
    meter.spent(replica(), 0.0, T)
    meter.computed("m", {"a": 10, "b": 20, "c": 10}, T)
    meter.spent(replica(), 80.0, T + INTERVAL_S)
    assert meter.joules == {("m", "a"): 20.0, ("m", OTHERS): 60.0}
