"""The loss of a whole local cluster under requests: gateways go on, and know that no request is to blame."""

from __future__ import annotations

from typing import Any

import pytest

from policy.types import ReplicaPhase
from tests.contract.streams import Streams
from tests.e2e.stack import Stack, eventually, running
from tests.e2e.traffic import Traffic

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900, func_only=True)]

REPLICAS, WITHIN_S = 4, 240.0


def document() -> dict[str, Any]:
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": "sim-small", "speed": 0.05},
        "shapes": {"small": {"gpus": 1, "max_in_flight": 64}},
        "modes": {"multi-replica": {"shape": "small", "replicas": REPLICAS}},
        "control": {"policy": "static", "start_timeout_s": 120},
    }
    return {
        "models": [model],
        "cluster": {"simulated_gpus": 8},
        "gateway": {"queue_timeout_s": 120, "sse_keepalive_s": 600},
    }


def ready(stack: Stack) -> set[str]:
    return {each.id for each in stack.replicas("m") if each.state is ReplicaPhase.READY}


def test_requests_without_an_answer_outlive_the_gcs_and_its_replicas() -> None:
    """Streams that have begun end with an error event; no other request is answered 500 or 502."""
    with running(document()) as stack:
        stack.steady("m", REPLICAS)
        before = ready(stack)
        whole = Traffic(stack, "m", clients=8, stream=False, max_tokens=60, pause_s=0.0)
        with whole, Streams(stack, "m", (20, 40, 80), clients=8) as streams:
            eventually(lambda: len(whole.outcomes) > 8 and len(streams.ended) > 8, WITHIN_S)
            (gcs,) = [process for process in stack.processes() if process.name() == "gcs_server"]
            gcs.kill()
            eventually(lambda: len(ready(stack) - before) == REPLICAS, WITHIN_S)
            answered, ended = len(whole.outcomes), len(streams.ended)
            eventually(
                lambda: len(whole.outcomes) > answered + 8 and len(streams.ended) > ended + 8, WITHIN_S
            )
        # Of the others those that find no replica left may be asked to come again.
        again = '"code":"no_replica"'
        assert all(again in problem for problem in whole.problems), whole.problems
        assert all(": cut after" in each or again in each for each in streams.problems), streams.problems
