"""Load alone switches modes on Ray Serve over simulated engines: no request fails, no stream is cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.stack import Stack, eventually
from tests.e2e.traffic import Traffic
from tidegate.supervisor.preflight import foreign_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "sim"
LOW, HIGH = 0.8, 4.5
# A token each 84 ms of the large one alone, 167 ms of a small one; four of these have four times its seats.
DOCUMENT: dict[str, Any] = {
    "models": [
        {
            "name": MODEL,
            "engine": "sim",
            "sim": {"profile": "h100-8b", "speed": 0.05, "start_s": 2.0},
            "shapes": {
                "large": {"gpus": 4, "tensor_parallel": 4, "max_in_flight": 4},
                "small": {"gpus": 1, "max_in_flight": 4},
            },
            "modes": {
                "single-large": {"shape": "large", "replicas": 1},
                "multi-replica": {"shape": "small", "replicas": {"min": 2, "max": 4}},
            },
            "control": {
                "tick_s": 1,
                "slo": {"itl_p95_s": 0.13},
                "mode": {"drain_timeout_s": 60, "confirm_s": 3, "dwell_s": 20, "gain": 0.15},
                "scale": {"hold_s": 10},
                "assumed_start_s": 15,
            },
        }
    ],
    "budget": {"gpus": 8},
    "gateway": {"workers": 1, "queue_timeout_s": 120},
}


@contextmanager
def load(stack: Stack, rate: float, problems: list[str]) -> Iterator[None]:
    """So many streams per second, whoever answers, until the block ends; those that were asked for finish."""
    stop = threading.Event()
    asking = Traffic(stack, MODEL, max_tokens=16)
    pool = ThreadPoolExecutor(200)
    asked: list[Future[tuple[str, str]]] = []

    def run() -> None:
        with httpx.Client(base_url=stack.base_url, timeout=300, trust_env=False) as client:
            due = time.monotonic()
            while not stop.is_set():
                asked.append(pool.submit(asking._one, client, str(len(asked))))
                due += 1.0 / rate
                stop.wait(max(0.0, due - time.monotonic()))
            problems.extend(problem for _, problem in (each.result() for each in asked) if problem)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        pool.shutdown()


def runs(stack: Stack, mode: str, least: int) -> bool:
    """Whether the model is in ``mode`` with at least so many replicas, and nothing else is there."""
    now = stack.model(MODEL)
    return (now.mode, now.phase) == (mode, "steady") and now.ready >= least


def test_load_alone_switches_the_mode_under_ray_and_back(tmp_path: Path) -> None:
    if other := foreign_ray(()):
        pytest.skip(other)
    stack = Stack(tmp_path, DOCUMENT)
    problems: list[str] = []
    try:
        stack.up()
        said = lambda: f"{stack.model(MODEL)} {stack.controller.status().events[-12:]}"  # noqa: E731
        with load(stack, LOW, problems):
            eventually(lambda: runs(stack, "single-large", 1), 60, said)
        with load(stack, HIGH, problems):
            eventually(lambda: runs(stack, "multi-replica", 3), 200, said)
        with load(stack, LOW, problems):
            eventually(lambda: runs(stack, "single-large", 1), 300, said)
        changes = [each.decision for each in stack.controller.decisions(MODEL, 500) if each.decision.changes]
        gains = [decision.gain for decision in changes if decision.gain is not None]
        assert len(gains) == 2
        assert min(gains) >= 0.15
    finally:
        stack.down()
    assert not problems
