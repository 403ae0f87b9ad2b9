"""The adapter loader: one load for any number of requests, and no eviction of an adapter in use."""

from __future__ import annotations

import asyncio
import random

import pytest

from policy.adapter_placement.slots import HALF_LIFE_S, PATIENCE_S, PREFETCH_PAUSE
from policy.errors import AdapterRefused
from policy.wire.heartbeat import AdapterUse
from serve.engine.adapters import loader
from serve.engine.adapters.loader import BACKOFF
from tests.serve.engine.fakes import Replica, digest, quiet, replica, served, wanted
from tests.serve.sim_driver import until


async def test_200_first_requests_are_one_load_and_one_fetch() -> None:
    async with replica(2) as there:
        there.engine.gate.clear()
        users = [there.use("a") for _ in range(200)]
        await until(lambda: bool(there.engine.log))
        await quiet()
        assert not any(user.in_use for user in users)
        there.engine.gate.set()
        await until(lambda: all(user.in_use for user in users))
        assert (there.files.fetched, there.engine.log) == (["a"], ["+a"])
        assert there.engine.there == [served("a")]
        for user in users:
            await user.stop()
        (use,) = there.adapters.uses()
        assert (use.name, use.digest) == ("a", digest("a"))
        assert (use.requests, use.found, use.loads) == (200, 0, 1)
        assert there.adapters.uses() == ()


async def test_a_loaded_adapter_is_used_at_once() -> None:
    async with replica(1) as there:
        await there.used("a")
        with there.adapters.lease("a", digest("a")) as arrival:
            assert arrival is None
        assert there.adapters.uses() == (
            AdapterUse(name="a", digest=digest("a"), requests=2, found=1, loads=1),
        )
        # Another version of the same name is another adapter.
        with there.adapters.lease("a", digest("b")) as arrival:
            assert arrival is not None


async def test_the_lowest_reload_cost_times_requests_is_evicted_first() -> None:
    async with replica(3) as there:
        there.engine.takes_s = {served("a"): 10.0}
        await there.used("a" + "b" * 5 + "c" * 2)
        # Seconds to reload times requests: 10 for a, 5 and 2 of the least for b and c.
        await there.used("d")
        assert there.engine.log[-2:] == ["-c", "+d"]
        await there.used("d" * 9 + "c")
        assert there.engine.log[-2:] == ["-b", "+c"]


async def test_requests_without_a_slot_wait_in_order() -> None:
    async with replica(2) as there:
        a, b = there.use("a"), there.use("b")
        await until(lambda: a.in_use and b.in_use)
        late = []
        for letter in "cde":
            late.append(there.use(letter))
            await quiet()
            there.clock.now += 0.1
        again = there.use("c")
        await quiet()
        assert not any(user.in_use for user in [*late, again])
        await b.stop()
        await until(lambda: late[0].in_use and again.in_use)
        await quiet()
        assert there.engine.log == ["+a", "+b", "-b", "+c"]
        await a.stop()
        await until(lambda: late[1].in_use)
        await late[0].stop()
        await quiet()
        assert not late[2].in_use
        await again.stop()
        await until(lambda: late[2].in_use)
        assert there.engine.log[4:] == ["-a", "+d", "-c", "+e"]
        for user in late[1:]:
            await user.stop()


async def test_waiting_requests_and_busy_time_are_counted() -> None:
    async with replica(1) as there:
        first, second = there.use("a"), there.use("a")
        await until(lambda: first.in_use)
        there.files.slow = {"c"}
        waits = [there.use(letter) for letter in "bbc"]
        await quiet()
        there.clock.now += 1.5
        # Of those that wait for a slot: c waits for its files.
        assert {use.name: use.waiting for use in there.adapters.uses()} == {"a": 0, "b": 2, "c": 0}
        assert [(use.name, use.waiting) for use in there.adapters.uses()] == [("b", 2)]
        await first.stop()
        await second.stop()
        await until(lambda: waits[0].in_use)
        (a, b) = there.adapters.uses()
        assert (a.name, a.busy_s, b.name, b.waiting, b.busy_s) == ("a", 3.0, "b", 0, 0.0)
        there.clock.now += 0.5
        for user in waits[:2]:
            await user.stop()
        assert [use.busy_s for use in there.adapters.uses() if use.name == "b"] == [1.0]
        waits[2].task.cancel()


async def test_constant_requests_for_one_adapter_do_not_starve_others() -> None:
    async with replica(1) as there:
        first = await there.using("a")
        waits = there.use("b")
        await quiet()
        joins = await there.using("a")
        there.clock.now += PATIENCE_S
        late = there.use("a")
        await first.stop()
        await quiet()
        assert not late.in_use
        assert not waits.in_use
        await joins.stop()
        await until(lambda: waits.in_use)
        await quiet()
        assert not late.in_use
        await waits.stop()
        await until(lambda: late.in_use)
        await late.stop()
        assert there.engine.log == ["+a", "-a", "+b", "-b", "+a"]


async def test_requests_that_waited_for_a_load_use_it_first() -> None:
    async with replica(1) as there:
        first = await there.using("a")
        late = [there.use(letter) for letter in "bcdbcd"]
        await quiet()
        there.clock.now += 10 * PATIENCE_S
        await first.stop()
        for letter in "bcd":
            users = [user for user in late if user.letter == letter]
            await until(lambda: all(user.in_use for user in users))  # noqa: B023
            for user in users:
                await user.stop()
        assert there.engine.log == ["+a", "-a", "+b", "-b", "+c", "-c", "+d"]


async def test_requests_that_yielded_continue_when_nobody_waits_any_more() -> None:
    async with replica(1) as there:
        first = await there.using("a")
        waits = there.use("b")
        await quiet()
        there.clock.now += PATIENCE_S
        late = there.use("a")
        await quiet()
        assert not late.in_use
        waits.task.cancel()
        await until(lambda: late.in_use)
        await first.stop()
        await late.stop()
        assert there.engine.log == ["+a"]


@pytest.mark.parametrize("where", ["files", "engine"])
async def test_a_failed_load_is_not_retried_by_every_request(where: str) -> None:
    async with replica(2) as there:
        if where == "files":
            there.files.missing = {"a"}
        else:
            there.engine.refuses = {served("a")}
        changes = []
        there.adapters.watch(lambda: changes.append(there.adapters.refused()))
        users = [there.use("a") for _ in range(200)]
        failed = await asyncio.gather(*(user.task for user in users), return_exceptions=True)
        assert all(isinstance(error, AdapterRefused) for error in failed)
        assert len({id(error) for error in failed}) == 200
        with pytest.raises(AdapterRefused), there.adapters.lease("a", digest("a")):
            pass
        assert (there.files.fetched, there.adapters.refused()) == (["a"], (served("a"),))
        assert (served("a"),) in changes
        (use,) = there.adapters.uses()
        assert (use.requests, use.loads) == (201, 0)
        assert use.failed.startswith({"files": "files_missing: ", "engine": "engine_refused: "}[where])
        # Others are served meanwhile, and it is retried.
        await there.used("b")
        there.clock.now += BACKOFF.first_s
        assert there.adapters.refused() == ()
        there.files.missing, there.engine.refuses = set(), set()
        await there.used("a")
        assert sorted(there.engine.there) == [served("a"), served("b")]
        assert [use.failed for use in there.adapters.uses()] == ["", ""]


async def test_an_adapter_whose_requests_left_is_not_loaded() -> None:
    async with replica(1) as there:
        held = await there.using("a")
        gone = there.use("b")
        await quiet()
        gone.task.cancel()
        await held.stop()
        await quiet()
        assert there.engine.log == ["+a"]
        # Its files are fetched again for the next request.
        await there.used("b")
        assert there.files.fetched == ["a", "b", "b"]


async def test_files_of_loaded_adapters_are_retained() -> None:
    async with replica(2) as there:
        await there.used("abc")
        assert there.files.retained == {"a", "b", "c"}
        loaded = {name[0] for name in there.engine.there}
        await there.used("d")
        assert there.files.retained == loaded | {"d"}


async def test_planned_adapters_are_loaded_ahead_in_order() -> None:
    async with replica(3) as there:
        there.adapters.hold(wanted("cab"))
        await there.adapters.settled()
        assert there.engine.log == ["+c", "+a", "+b"]
        assert [use.requests for use in there.adapters.uses()] == [0, 0, 0]
        # A plan beyond the slots is cut.
        there.adapters.hold(wanted("dcab"))
        await there.adapters.settled()
        assert there.engine.log[3:] == ["-b", "+d"]


async def test_an_unloadable_planned_adapter_does_not_block_others() -> None:
    async with replica(3) as there:
        there.files.missing = {"a"}
        there.engine.refuses = {served("b")}
        there.adapters.hold(wanted("abc"))
        await there.adapters.settled()
        assert there.engine.there == [served("c")]
        assert sorted(there.adapters.refused()) == [served("a"), served("b")]


async def test_a_prefetch_evicts_nothing_in_use_or_recently_requested() -> None:
    async with replica(2) as there:
        used = await there.using("a")
        await there.used("b")
        there.adapters.hold(wanted("c"))
        await there.adapters.settled()
        assert there.engine.log == ["+a", "+b"]
        # After a half-life one request for b no longer keeps it.
        there.clock.now += 1.1 * HALF_LIFE_S
        there.adapters.hold(wanted("c"))
        await there.adapters.settled()
        assert there.engine.log[2:] == ["-b", "+c"]
        await used.stop()


async def fetching(there: Replica, letters: str) -> None:
    """Hold these adapters, and leave the fetch of ``a``, the first, unfinished."""
    there.files.slow = {"a"}
    there.adapters.hold(wanted(letters))
    await until(lambda: there.files.fetched == ["a"])


async def test_requests_precede_prefetches_and_evict_planned_adapters_last() -> None:
    async with replica(2) as there:
        await fetching(there, "ab")
        await there.used("c")
        assert there.engine.log == ["+c"]
        there.files.go.set()
        await there.adapters.settled()
        assert there.engine.log[1:] == ["+a"]
        # c is requested often, but is not planned.
        await there.used("c" * 9 + "d")
        assert there.engine.log[2:] == ["-c", "+d"]
        # The least valuable planned adapter is evicted before one in use.
        used = await there.using("d")
        await there.used("c")
        assert there.engine.log[4:] == ["-a", "+c"]
        await used.stop()


async def test_an_adapter_no_longer_planned_is_not_loaded() -> None:
    async with replica(2) as there:
        await fetching(there, "a")
        there.adapters.hold(())
        there.files.go.set()
        await there.adapters.settled()
        assert there.engine.log == []


async def test_the_pause_after_a_load_is_as_long_as_the_load() -> None:
    async with replica(3) as there:
        there.engine.takes_s = {served(letter): 0.5 for letter in "abc"}
        await there.used("a")
        assert there.slept == []
        there.engine.running = 1
        await there.used("bc")
        await quiet()
        assert there.slept == [0.5, 0.5]
        assert [use.load_s for use in there.adapters.uses()] == [0.5, 0.5, 0.5]


async def test_prefetches_pause_longer_and_delay_no_request() -> None:
    async with replica(4) as there:
        there.engine.running = 1
        there.engine.takes_s = {served(letter): 3600.0 for letter in "ab"}
        there.adapters.hold(wanted("ab"))
        await until(lambda: len(there.engine.there) == 1)
        await quiet()
        assert there.files.fetched == ["a"]
        await there.used("c")
        there.clock.now += PREFETCH_PAUSE * 3600.0
        await there.used("d")
        await until(lambda: len(there.engine.there) == 4)
        assert there.engine.log == ["+a", "+c", "+d", "+b"]


async def test_slots_follow_evictions_by_the_engine() -> None:
    async with replica(3) as there:
        used = there.use("a")
        await there.used("b")
        await until(lambda: used.in_use)
        there.engine.there[:] = ["unknown@x"]
        there.clock.now += loader.CHECK_S
        there.adapters.hold(())
        await until(lambda: there.engine.there == [served("a")])
        # An adapter in use is loaded again at once, an idle one when it is requested.
        assert there.engine.log[2] == "-u"
        assert sorted(there.engine.log[3:]) == ["+a", "-b"]
        await there.used("b")
        assert there.engine.log[-1] == "+b"
        await used.stop()


async def test_slots_follow_evictions_during_a_load() -> None:
    async with replica(3) as there:
        await there.used("ab")
        there.engine.there.remove(served("a"))
        await there.used("c")
        await until(lambda: there.engine.log[-1] == "-a")
        await there.used("a")
        assert there.engine.log == ["+a", "+b", "+c", "-a", "+a"]


async def test_an_unexpected_error_of_files_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    async with replica(1) as there:

        async def fetch(_: str) -> None:
            raise RuntimeError("surprise")

        there.files.fetch = fetch  # type: ignore[method-assign,assignment]
        with pytest.raises(AdapterRefused, match="surprise"):
            await there.used("a")
        assert "surprise" in caplog.text


async def test_an_engine_without_slots_refuses() -> None:
    async with replica(0) as there:
        there.adapters.hold(wanted("a"))
        await there.adapters.settled()
        with pytest.raises(AdapterRefused) as refused, there.adapters.lease("a", digest("a")):
            pass
        assert refused.value.code == "no_slots"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slots", [1, 3])
async def test_all_requests_are_served_in_any_order_of_events(slots: int, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    async with replica(slots) as there:
        there.engine.refuses = {served("f")}
        users = []
        for _ in range(150):
            users.append(there.use(chance.choice("aaabbcdef")))
            for user in chance.sample(users, min(3, len(users))):
                if user.in_use and chance.random() < 0.4:
                    assert served(user.letter) in there.engine.there
                    await user.stop()
                elif chance.random() < 0.05:
                    user.task.cancel()
            there.clock.now += chance.random()
            if chance.random() < 0.1:
                there.adapters.hold(wanted("".join(chance.sample("abcdef", 2))))
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            assert all(served(user.letter) in there.engine.there for user in users if user.in_use)
        while not all(user.task.done() for user in users):
            for user in users:
                if user.in_use:
                    await user.stop()
            await asyncio.sleep(0)
        await asyncio.gather(*(user.task for user in users), return_exceptions=True)
        # Nothing of them is left: all slots are free for others.
        others = [there.use(str(number)) for number in range(slots)]
        await until(lambda: all(user.in_use for user in others))
        for user in others:
            await user.stop()
