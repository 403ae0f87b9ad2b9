"""A ladder of modes on one shared GPU group on Ray, switched by hand and by load while clients stream."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.contract.streams import Streams
from tests.e2e.stack import Stack, eventually, running

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

log = logging.getLogger(__name__)

GPUS, WAKE_S, WITHIN_S = 8, 1.0, 400.0
# "Wake plus 2 s" beyond the last token of the old mode.
GAP_S = WAKE_S + 2.0
MODES = {"tp8": (8, 1), "tp4": (4, 2), "tp1": (1, 8)}
# Every direction once.
TOUR = ("tp8", "tp4", "tp1", "tp8", "tp1", "tp4", "tp8")
# 1 to 60 s on one GPU of the profile at this speed.
SPEED, LENGTHS = 0.1, (12, 12, 25, 25, 25, 50, 50, 100, 100, 200, 400, 750)
# By load: some streams of 120 s there. Only tp8 is within the SLO. With four streams at once per replica it
# carries two a second, or three where none is long; tp4 carries 3.5 and 5, tp1 7 and 10.
MIXED = (*(12,) * 30, *(25,) * 30, *(50,) * 25, *(100,) * 14, 1500)
LOADS = (("tp8", 1.0), ("tp4", 2.5), ("tp1", 4.2), ("tp4", 2.5), ("tp8", 1.0))
BY_LOAD: dict[str, Any] = {
    "policy": "predictive",
    "tick_s": 1,
    "slo": {"itl_p95_s": 0.038},
    "mode": {"confirm_s": 5, "dwell_s": 60, "drain_timeout_s": 150},
}


def document(seats: int = 64, queue_s: float = 120, **control: Any) -> dict[str, Any]:
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": "h100-8b", "speed": SPEED, "start_s": 1.0, "wake_s": WAKE_S},
        "shapes": {
            mode: {"gpus": gpus, "tensor_parallel": gpus, "max_in_flight": seats}
            for mode, (gpus, _) in MODES.items()
        },
        "modes": {mode: {"shape": mode, "replicas": count} for mode, (_, count) in MODES.items()},
        "control": {"policy": "static", "mode": {"drain_timeout_s": 90}, "start_timeout_s": 120} | control,
    }
    return {
        "models": [model],
        "budget": {"gpus": GPUS},
        "cluster": {"simulated_gpus": GPUS},
        # A head that is sent early would not name the replica.
        "gateway": {"queue_timeout_s": queue_s, "sse_keepalive_s": 600},
    }


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running(document(**getattr(request, "param", {}))) as stack:
        yield stack


def is_steady(stack: Stack, mode: str) -> bool:
    status = stack.model("m")
    return (status.mode, status.phase) == (mode, "steady")


def test_every_switch_of_a_ladder_by_hand(stack: Stack) -> None:
    """No request fails, no stream is cut, and nobody serves only for the wake-up and the last tokens."""
    stack.steady("m", sum(count for _, count in MODES.values()))
    engines = {replica.id for replica in stack.replicas("m")}
    switched: list[tuple[str, float, float]] = []
    with Streams(stack, "m", LENGTHS) as streams:
        eventually(lambda: len(streams.ended) >= 10, WITHIN_S)
        for was, mode in pairwise(TOUR):
            began = time.time()
            assert stack.run("mode", "m", mode).returncode == 0
            eventually(lambda mode=mode: is_steady(stack, mode), WITHIN_S)
            served = len(streams.ended)
            eventually(lambda served=served: len(streams.ended) > served + 10, WITHIN_S)
            switched.append((f"{was} -> {mode}", began, time.time()))
    gaps = {name: streams.gap_s(began, ended) for name, began, ended in switched}
    log.info("%d streams; seconds without one: %s", len(streams.ended), gaps)
    assert not streams.problems
    assert {stream.replica.split("-")[1] for stream in streams.ended} == set(MODES)
    assert max(gaps.values()) < GAP_S, gaps
    assert {replica.id for replica in stack.replicas("m")} == engines


@pytest.mark.parametrize("stack", [BY_LOAD | {"seats": 4, "queue_s": 400}], indirect=True)
def test_load_climbs_and_descends_the_ladder(stack: Stack) -> None:
    """As by hand; and the controller finds the mode that each load needs."""
    stack.steady("m", sum(count for _, count in MODES.values()))
    switched: list[tuple[str, float, float]] = []
    with Streams(stack, "m", MIXED, clients=100, every_s=1.0) as streams:
        for mode, rate in LOADS:
            began, streams.every_s = time.time(), 1 / rate
            eventually(lambda mode=mode: is_steady(stack, mode), WITHIN_S, lambda: str(stack.model("m")))
            served = len(streams.ended)
            eventually(lambda served=served: len(streams.ended) > served + 10, WITHIN_S)
            switched.append((mode, began, time.time()))
    gaps = {f"{mode} {began:.0f}": streams.gap_s(began, ended) for mode, began, ended in switched}
    log.info("%d streams in %s; seconds without one: %s", len(streams.ended), switched, gaps)
    assert not streams.problems
    assert max(gaps.values()) < GAP_S, gaps
