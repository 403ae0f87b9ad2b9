"""Load alone decides: how many replicas there are, of which shape, and whether there is any."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from serve.autoscaler.journal import replayed
from serve.autoscaler.policies import policies_for
from serve.controller_api import SwitchOutcome
from tests.faults.live import MODEL
from tests.faults.scaled import Making, Scaled
from tests.gateway.worker import until

pytestmark = pytest.mark.process

HOLD_S = 6.0
# Steps of 0.1 s and four seats: a replica streams 16 tokens to about 2.3 requests a second.
SMALL = {"cpus": 1, "max_in_flight": 4}
SIM = {"profile": "sim-small", "speed": 0.03, "start_s": 5.0}
CONTROL = {
    "tick_s": 1,
    "scale": {"hold_s": HOLD_S},
    "mode": {"drain_timeout_s": 60},
    "assumed_start_s": 20,
}


def small(least: int = 1, **control: Any) -> dict[str, Any]:
    """One to four small replicas."""
    return {
        "sim": SIM,
        "shapes": {"small": SMALL},
        "modes": {"multi-replica": {"shape": "small", "replicas": {"min": least, "max": 4}}},
        "control": CONTROL | control,
    }


async def test_a_step_of_load_is_followed_up_and_down(made: Making) -> None:
    site = await made(small())
    await site.load(1.0, {"small": 1}, 60)
    before = len(site.replies)
    up_at = time.time()
    await site.load(6.0, {"small": 4}, 90)
    down_at = time.time()
    await site.load(1.0, {"small": 1}, 180)
    site.check_replies()
    assert len(site.replies) > before + 20
    changes = [
        (line.at, line.situations[MODEL], line.decisions[MODEL])
        for line in site.rounds()
        if line.decisions[MODEL].changes
    ]
    first_at, situation, first = next(each for each in changes if each[0] > up_at)
    assert first.count > 1
    assert first_at - up_at < situation.rungs[0].lead_s, "it was not asked for within one lead time"
    falls = [at for at, _, decision in changes if at > up_at and decision.count < decision.was_count]
    assert min(falls) - down_at >= HOLD_S - 1.0
    assert situation.rungs[0].lead_s < CONTROL["assumed_start_s"]
    for line in site.rounds():
        minds = {name: policies_for(name, chosen, print) for name, chosen in line.policies.items()}
        assert replayed(line, minds) == line.decisions


async def test_nobody_asks_and_somebody_wakes_it(made: Making) -> None:
    scale = {"scale": {"hold_s": 1, "zero_after_s": 3, "standby": 1.0}, "tick_s": 30}
    site = await made(small(least=0, **scale))
    reply = await site.ask(MODEL, max_tokens=4)
    assert reply.status == 200
    site.models[0]["control"]["tick_s"] = 1
    await site.apply()
    await asleep(site)
    site.models[0]["control"]["tick_s"] = 60
    await site.apply()
    # Nothing is due for most of a minute but for those that wait.
    waking = [asyncio.create_task(site.ask(MODEL, stream=True, max_tokens=4)) for _ in range(5)]
    replies = await asyncio.gather(*waking)
    assert [(reply.status, reply.error) for reply in replies] == [(200, None)] * 5
    assert max(reply.took_s for reply in replies) < 30


async def asleep(site: Scaled) -> None:
    deadline = time.monotonic() + 90
    while (await site.status())["phase"] != "idle" or (await site.tell("GET", "/fleet"))["replicas"]:
        assert time.monotonic() < deadline, await site.status()
        await asyncio.sleep(0.1)


# A token each 84 ms of the large one alone, 167 ms of a small one; four of these have four times its seats.
LOW, HIGH = 0.8, 4.5


def ladder(**control: Any) -> dict[str, Any]:
    """Large while that keeps its promise, small ones when it cannot keep up."""
    return {
        "sim": {"profile": "h100-8b", "speed": 0.05, "start_s": 2.0},
        "shapes": {
            "large": {"gpus": 4, "tensor_parallel": 4, "max_in_flight": 4},
            "small": {"gpus": 1, "max_in_flight": 4},
        },
        "modes": {
            "single-large": {"shape": "large", "replicas": 1},
            "multi-replica": {"shape": "small", "replicas": {"min": 4, "max": 4}},
        },
        "control": CONTROL
        | {
            "slo": {"itl_p95_s": 0.13},
            "policy": "target_tracking",
            "mode": {"drain_timeout_s": 60, "confirm_s": 3, "dwell_s": 20, "gain": 0.15},
        }
        | control,
    }


async def test_load_alone_switches_the_mode_and_back(made: Making) -> None:
    site = await made(ladder(), budget={"gpus": 8})
    await site.load(LOW, {"large": 1}, 60)
    await site.load(HIGH, {"small": 4}, 150)
    await site.load(LOW, {"large": 1}, 180)
    site.check_replies()
    gains = [line.decisions[MODEL].gain for line in site.rounds() if line.decisions[MODEL].gain is not None]
    assert len(gains) == 2
    assert all(gain is not None and gain >= 0.15 and math.isfinite(gain) for gain in gains)
    deadline = time.monotonic() + 120
    while not (found := [line for line in site.lines() if isinstance(line, SwitchOutcome)]):
        assert time.monotonic() < deadline
        await site.one()
    (said,) = [event for event in await site.events() if "measured" in event]
    assert f"gain promised {found[0].promised:.0%}, measured {found[0].measured:.0%}" in said


ROOMY, SCARCE = 8, 4
PHASES = {ROOMY: ("switching", "draining the old"), SCARCE: ("giving way", "starting")}


@pytest.mark.parametrize("gpus", [ROOMY, SCARCE])
async def test_a_controller_killed_in_each_phase_of_a_switch_finishes_it(made: Making, gpus: int) -> None:
    site = await made(ladder(), budget={"gpus": gpus})
    await site.load(LOW, {"large": 1}, 60)
    async with site.under(HIGH):
        killed = [await site.kill_in(phase, 60) for phase in PHASES[gpus]]
        await site.rest({"small": 4}, 120)
        # It is the same switch, and not another one.
        assert killed == [site.target().since] * 2
    site.check_replies()


async def test_a_controller_killed_while_it_rolls_back_goes_on(made: Making) -> None:
    spec = ladder()
    spec["control"]["mode"] |= {"dwell_s": 120}
    # More than the memory of its one card.
    spec["shapes"]["small"] |= {"engine_args": {"max_model_len": 10_000_000}}
    site = await made(spec, budget={"gpus": SCARCE}, gateway={"queue_timeout_s": 120})
    await site.load(LOW, {"large": 1}, 60)
    async with site.under(HIGH):
        await site.until_phase("starting", 60)
    async with site.under(LOW):
        await until(lambda: site.target().note.startswith("rolled back"), "the mode fails")
        # Its hosts take some tenths of a second to end.
        since = await site.kill()
        await site.rest({"large": 1}, 60)
    site.check_replies()
    status = await site.status()
    assert status["note"].startswith("rolled back from multi-replica x 4, generation 1: ")
    assert "KV cache" in status["note"]
    assert set(status["barred"]) == {"multi-replica"}
    assert site.target().since == since
