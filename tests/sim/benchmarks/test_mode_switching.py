"""Switching modes by load is compared with each fixed mode, on the same arrivals for each seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from policy.scaling.policies.registry import choose, make
from sim.arrivals import Arrival
from sim.benchmarks.mode_switching import BY_LOAD, WINDOW_S, compare, curves, fixed_mode
from sim.results.run_summary import PolicyEntry
from sim.simulator.run import simulate
from sim.simulator.run_record import RunRecord
from tests.sim.records import record

LONG, SHORT = "single-large", "multi-replica"


def deployment(**more: Any) -> Deployment:
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": "a100-8b", "wake_s": 1},
        "shapes": {
            "large": {"gpus": 4, "tensor_parallel": 4, "max_in_flight": 16},
            "small": {"gpus": 1, "max_in_flight": 16},
        },
        "modes": {LONG: {"shape": "large"}, SHORT: {"shape": "small", "replicas": {"min": 1, "max": 4}}},
        "control": {
            "slo": {"ttft_p95_s": 0.5, "itl_p95_s": 0.05},
            "tick_s": 1,
            "assumed_start_s": 1,
            "mode": {"confirm_s": 2, "dwell_s": 20},
            **more,
        },
    }
    return parse({"models": [model], "budget": {"gpus": 4}})


def contender(document: Deployment) -> PolicyEntry:
    return PolicyEntry("as written", document, {"m": make(choose("", "predictive"))})


def arrivals(seed: int) -> Iterator[Arrival]:
    """Prompts that only the large shape serves within the SLO, then more chat than its capacity."""
    for begins, lasts, rate, inputs, outputs in ((0.0, 120.0, 2.0, 6000, 20), (120.0, 60.0, 18.0, 300, 300)):
        for i in range(int(rate * lasts)):
            yield Arrival(begins + (i + seed / 10) / rate, inputs, outputs)


def played(
    contender: PolicyEntry, asked: Iterable[Arrival], seed: int, progress: Callable[[float], None]
) -> RunRecord:
    return simulate(contender.deployment, contender.policies, asked, seed=seed, progress=progress)


def test_a_single_mode_is_static_at_its_maximum_count() -> None:
    alone = fixed_mode(deployment())
    assert [each.name for each in alone] == [LONG, SHORT]
    for each, count in zip(alone, (1, 4), strict=True):
        (spec,) = each.deployment.models
        assert list(spec.modes) == [each.name] == [spec.first_mode]
        bounds = spec.modes[each.name].bounds
        assert (bounds.min, bounds.max) == (count, count)
        assert spec.control.policy == "static"


def test_a_comparison_needs_one_model_with_two_modes() -> None:
    document = deployment()
    (spec,) = document.models
    single = parse(
        {"models": [{"name": "m", "engine": "sim", "shapes": {"a": {"gpus": 1}},
                     "modes": {SHORT: {"shape": "a"}}}]}
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"models\[m\]\.modes.*multi-replica.*two modes"):
        fixed_mode(single)
    with pytest.raises(ConfigError, match="one model"):
        fixed_mode(msgspec.structs.replace(document, models=(spec, spec)))


def test_the_gain_of_each_seed_is_over_the_better_fixed_mode() -> None:
    # Requests within the SLO, by contender and seed, of as many a minute for a minute.
    counts = {BY_LOAD: (120, 60), LONG: (100, 20), SHORT: (60, 50)}
    asked: list[tuple[str, int]] = []
    reports: list[tuple[str, float]] = []

    def play(
        each: PolicyEntry, given: Iterable[Arrival], seed: int, report: Callable[[float], None]
    ) -> RunRecord:
        asked.append((each.name, seed))
        assert list(given) == [Arrival(float(seed), 1, 1)]
        report(30.0)
        found = record(minutes=1)
        (table,) = found.requests.values()
        at = np.linspace(0.0, 59.0, counts[each.name][seed])
        many = {
            name: np.resize(getattr(table, name), len(at))
            for name in table.__dataclass_fields__
            if name not in ("at", "met")
        }
        found.requests = {"m": replace(table, at=at, met=np.ones(len(at), dtype=np.bool_), **many)}
        found.ends_at = 60.0
        return found

    found = compare(
        contender(deployment()),
        lambda seed: iter([Arrival(float(seed), 1, 1)]),
        play,
        (0, 1),
        lambda name, at: reports.append((name, at)),
    )
    assert asked == [(name, seed) for name in counts for seed in (0, 1)]
    assert reports == [(name, at) for name in counts for at in (30.0, 90.0)]
    assert found.gains == pytest.approx((120 / 100 - 1, 60 / 50 - 1))
    assert [each.goodput_rps for each in found.figures().values()] == pytest.approx([1.5, 1.0, 55 / 60])
    assert found.plain()["gains"] == list(found.gains) and list(found.plain()["runs"]) == list(counts)
    assert found.trials[LONG][0].curve[0] == pytest.approx(100 / WINDOW_S)


@pytest.mark.slow
def test_switching_modes_serves_more_of_a_changing_load_than_either_mode() -> None:
    found = compare(contender(deployment()), arrivals, played, (0,))
    switched, large, small = (row[0].summary for row in found.trials.values())
    assert switched.switches == 1 and large.switches == small.switches == 0
    assert found.gains[0] > 0.1
    assert switched.gpu_hours == pytest.approx(large.gpu_hours, rel=0.02), "all hold the same GPUs throughout"
    assert switched.gpu_hours == pytest.approx(small.gpu_hours, rel=0.02)
    assert [stay.mode for stay in found.trials[BY_LOAD][0].stays] == [LONG, SHORT]
    picture = ElementTree.fromstring(curves("<here>", {name: row[0] for name, row in found.trials.items()}))  # noqa: S314 - our own
    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "<here>" in texts and texts.count(LONG) == 2 and texts.count(SHORT) == 2 and "by load" in texts
