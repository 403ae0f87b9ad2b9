"""A switch of modes on shared GPUs under streams, through the command line, without Ray."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.ports import free_ports
from tests.tidegate.conftest import Site, until

pytestmark = pytest.mark.process

GPUS, WAKE_S = 4, 0.5
SHORT, LONG = 30, 2000


def document(site: Site) -> dict[str, Any]:
    made = site.shipped("sim.yaml")
    made["cluster"]["simulated_gpus"] = GPUS
    made["budget"] = {"gpus": GPUS}
    (model,) = made["models"]
    model |= {
        "name": "m",
        "sim": {"profile": "h100-8b", "start_s": 0.1, "wake_s": WAKE_S},
        "shapes": {"large": {"gpus": GPUS, "tensor_parallel": GPUS}, "small": {"gpus": 1}},
        "modes": {
            "multi-replica": {"shape": "small", "replicas": {"min": GPUS, "max": GPUS}},
            "single-large": {"shape": "large", "replicas": 1},
        },
        "control": {"policy": "static", "mode": {"drain_timeout_s": 60}},
    }
    return made


def complete(site: Site, tokens: int) -> tuple[int, float]:
    body = {
        "model": "m",
        "prompt": "hello",
        "max_tokens": tokens,
        "stream": tokens == LONG,
        "ignore_eos": True,
    }
    url = f"http://127.0.0.1:{site.port}/v1/completions"
    answer = httpx.post(url, json=body, timeout=120, trust_env=False)
    assert tokens != LONG or answer.text.endswith("data: [DONE]\n\n")
    return answer.status_code, time.monotonic()


@pytest.mark.long
def test_replicas_serve_until_the_longest_stream_of_a_switch_ends(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    site = Site(tmp_path_factory.mktemp("switch"), *free_ports(2), upstream="")
    site.up(document(site))
    answers: list[tuple[int, float]] = []
    longest: list[tuple[int, float]] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            answers.append(complete(site, SHORT))

    stream = threading.Thread(target=lambda: longest.append(complete(site, LONG)))
    clients = [threading.Thread(target=client) for _ in range(3)]
    try:
        stream.start()
        for each in clients:
            each.start()
        until(lambda: len(answers) > 50, "answers beside the stream")
        began = time.monotonic()
        code, _, err = site.tidegate("mode", "m", "single-large", "--json")
        assert code == 0, err
        until(lambda: site.status()["models"][0]["phase"] == "steady", "the switch")
        served = len(answers)
        until(lambda: len(answers) > served, "an answer of the new mode")
    finally:
        over.set()
        for each in [stream, *clients]:
            each.join()
        site.tidegate("down")
    instants = sorted(at for _, at in answers)
    longest_gap_s = max(later - before for before, later in pairwise(instants))
    # Without that, the gap is as long as the stream.
    assert longest_gap_s < 0.5 * (longest[0][1] - began)
    assert {status for status, _ in [*answers, *longest]} == {200}
