"""A new generation of a model under load: beside the old one, in its place, and back when it fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.faults.scaled import Making, Scaled

pytestmark = pytest.mark.process

RATE = 2.0
# Ten seconds of a stream: what leaves waits for it.
LONG = 100


def two(**control: Any) -> dict[str, Any]:
    """Two replicas, each of which streams 16 tokens to about 2.3 requests a second."""
    return {
        "sim": {"profile": "sim-small", "speed": 0.03, "start_s": 1.0},
        "shapes": {"small": {"gpus": 1, "max_in_flight": 4}},
        "modes": {"multi-replica": {"shape": "small", "replicas": 2}},
        "control": {"tick_s": 1, "mode": {"drain_timeout_s": 60}, "start_timeout_s": 60} | control,
    }


async def generations(site: Scaled) -> dict[str, int]:
    """Of each replica."""
    return {one["id"]: one["generation"] for one in (await site.tell("GET", "/fleet"))["replicas"]}


def least_ready(site: Scaled) -> int:
    """Over all looks at the fleet."""
    ready = [sum(count for (_, state), count in look.items() if state == "ready") for look in site.looks]
    return min(ready)


def most_held(site: Scaled) -> int:
    """How many replicas there were at once, over all looks at the fleet."""
    return max(sum(count for (_, state), count in look.items() if state != "stopped") for look in site.looks)


async def test_an_upgrade_takes_the_place_of_what_serves(made: Making) -> None:
    site = await made(two(), budget={"gpus": 4})
    await site.rest({"small": 2}, 60)
    async with site.under(RATE):
        long = asyncio.create_task(site.stream(LONG))
        await asyncio.sleep(0.5)
        # There is room for both generations: the old one is whole until the new one is.
        site.models[0]["sim"] |= {"seed": 1}
        site.looks.clear()
        assert (await site.apply())["generation"] == 2
        await site.rest({"small": 2}, 90)
        assert set((await generations(site)).values()) == {2}
        assert least_ready(site) >= 2
        assert most_held(site) == 4
        await long
        # There is room for one replica more: the old ones leave as the new ones come.
        site.sections["budget"] = {"gpus": 3}
        site.models[0]["sim"] |= {"seed": 2}
        site.looks.clear()
        assert (await site.apply())["generation"] == 3
        await site.rest({"small": 2}, 90)
        assert set((await generations(site)).values()) == {3}
        assert least_ready(site) >= 1
        assert most_held(site) == 3
    site.check_replies()


TOO_LONG = {"engine_args": {"max_model_len": 10_000_000}}


async def test_an_upgrade_that_fails_is_rolled_back(made: Making) -> None:
    site = await made(two(), budget={"gpus": 4})
    await site.rest({"small": 2}, 60)
    before = await generations(site)
    good = site.models[0]
    async with site.under(RATE):
        for more, why in [(TOO_LONG, "KV cache"), (slow(good), "not ready after ")]:
            site.models = [good | more]
            site.looks.clear()
            failing = (await site.apply())["generation"]
            assert failing > 1
            await site.rest({"small": 2}, 90)
            status = await site.status()
            note = status["note"]
            assert note.startswith(f"rolled back from multi-replica x 2, generation {failing}: ")
            assert why in note
            assert any(event.endswith(note) for event in await site.events())
            assert status["generation"] == 1
            assert await generations(site) == before
            assert least_ready(site) >= 2
        # What served before is applied again, and then one that is better.
        site.models = [good]
        assert (await site.apply())["note"] == ""
        await site.rest({"small": 2}, 60)
        assert await generations(site) == before
        site.models = [good | {"sim": good["sim"] | {"seed": 1}}]
        made_of = (await site.apply())["generation"]
        assert made_of > 1
        await site.rest({"small": 2}, 90)
        assert set((await generations(site)).values()) == {made_of}
    site.check_replies()


def slow(model: dict[str, Any]) -> dict[str, Any]:
    """An engine that takes longer to start than a start may."""
    return {
        "sim": model["sim"] | {"start_s": 600.0},
        "control": model["control"] | {"start_timeout_s": 5},
    }
