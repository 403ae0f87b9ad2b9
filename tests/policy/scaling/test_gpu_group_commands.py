"""Orders to the engines of a shared GPU group: which start first, which serve, and that all of it ends."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.scaling.gpu_group_commands import GroupEngine, chosen_engines, gpu_commands
from policy.wire.heartbeat import GpuCommand

SERVE, MEASURE, WAIT, PREPARE, SLEEP = GpuCommand
LARGE = GroupEngine("large", "large", (0, 1))
SMALL, OTHER = GroupEngine("small", "small", (0,)), GroupEngine("other", "small", (1,))
ASLEEP = {"prepared": True}
STATES = ("serving", "chosen", "prepared", "failed", "unhealthy")
SERVING = {"prepared": True, "serving": True, "chosen": True}


@pytest.mark.parametrize(
    ("engines", "awake", "starting", "expected"),
    [
        pytest.param(({}, {}, {}), (1, 0), True, (WAIT, PREPARE, PREPARE), id="at first the others start"),
        pytest.param(({}, ASLEEP, {}), (1, 0), True, (WAIT, SLEEP, PREPARE), id="all of the others"),
        pytest.param(({}, ASLEEP, ASLEEP), (1, 0), True, (MEASURE, SLEEP, SLEEP), id="then the wanted one"),
        pytest.param(({}, ASLEEP, {"failed": True}), (1, 0), True, (MEASURE, SLEEP, PREPARE), id="failed"),
        pytest.param((SERVING, ASLEEP, ASLEEP), (1, 0), False, (SERVE, SLEEP, SLEEP), id="it serves"),
        pytest.param((ASLEEP, ASLEEP, ASLEEP), (0, 2), False, (SLEEP, SERVE, SERVE), id="a switch"),
        pytest.param((ASLEEP, {}, SERVING), (0, 1), False, (SLEEP, PREPARE, SERVE), id="its own GPU is free"),
        pytest.param((SERVING, {}, ASLEEP), (1, 0), False, (SERVE, SLEEP, SLEEP), id="its GPU is in use"),
        pytest.param(({}, {}, {}), (1, 0), False, (SERVE, SLEEP, SLEEP), id="after a crash the wanted one"),
        pytest.param((ASLEEP, {}, ASLEEP), (0, 1), False, (SLEEP, PREPARE, SERVE), id="one can be woken"),
        pytest.param((ASLEEP, ASLEEP, SERVING), (0, 1), False, (SLEEP, SLEEP, SERVE), id="nothing changes"),
        pytest.param(
            (ASLEEP, {"chosen": True}, ASLEEP), (0, 1), False, (SLEEP, SERVE, SLEEP), id="a start goes on"
        ),
        pytest.param(
            (ASLEEP, {"chosen": True, "failed": True}, {}), (0, 1), False, (SLEEP, PREPARE, SERVE),
            id="another if it failed",
        ),
        pytest.param(
            (ASLEEP, {**SERVING, "unhealthy": True}, ASLEEP), (0, 1), False, (SLEEP, SLEEP, SERVE),
            id="another GPU",
        ),
        pytest.param(
            (ASLEEP, {**SERVING, "unhealthy": True}, SERVING), (0, 2), False, (SLEEP, SERVE, SERVE),
            id="no other GPU",
        ),
        pytest.param((ASLEEP, {}, ASLEEP), (0, 0), False, (SLEEP, PREPARE, SLEEP), id="none is wanted"),
    ],
)  # fmt: skip
def test_the_orders_of_a_large_and_two_small_engines(
    engines: tuple[Mapping[str, bool], ...],
    awake: tuple[int, int],
    starting: bool,
    expected: tuple[GpuCommand, ...],
) -> None:
    made = [one._replace(**state) for one, state in zip((LARGE, SMALL, OTHER), engines, strict=True)]
    found = gpu_commands(made, dict(zip(("large", "small"), awake, strict=True)), starting=starting)
    assert tuple(found[engine.id] for engine in made) == expected


LADDER = [
    GroupEngine(f"{size}-{i}", f"tp{size}", tuple(range(i * size, (i + 1) * size)))
    for size in (8, 4, 1)
    for i in range(8 // size)
]


@given(
    st.integers(0, 2), st.integers(0, 8), st.lists(st.tuples(*[st.booleans()] * 5), min_size=11, max_size=11)
)
def test_engines_of_several_shapes_serve_on_different_gpus(
    fours: int, ones: int, states: list[tuple[bool, ...]]
) -> None:
    engines = [
        engine._replace(**dict(zip(STATES, state, strict=True)))
        for engine, state in zip(LADDER, states, strict=True)
    ]
    awake = {"tp8": 0, "tp4": fours, "tp1": min(ones, 8 - 4 * fours)}
    chosen = chosen_engines(engines, awake)
    assert {shape: sum(each.shape == shape for each in chosen) for shape in awake} == awake
    used = [card for engine in chosen for card in engine.cards]
    assert len(used) == len(set(used))


def test_a_large_engine_takes_the_gpus_on_which_the_fewest_serve() -> None:
    serving = {"1-0", "1-4", "1-5", "1-6"}
    engines = [engine._replace(serving=engine.id in serving) for engine in LADDER]
    chosen = {engine.id for engine in chosen_engines(engines, {"tp1": 4, "tp4": 1})}
    assert chosen == {"4-0", "1-4", "1-5", "1-6", "1-7"}


class Hosts:
    """Hosts that follow orders, each only when its turn comes; ``using`` is who has its GPUs."""

    def __init__(self) -> None:
        self.engines = {engine.id: engine for engine in (LARGE, SMALL, OTHER)}
        self.using: set[str] = set()
        self.served = False

    def turn(self, name: str, awake: Mapping[str, int]) -> None:
        found = gpu_commands(list(self.engines.values()), awake, starting=not self.served)
        engine, order = self.engines[name], found[name]
        free = not any(set(self.engines[other].cards) & set(engine.cards) for other in self.using - {name})
        serves = order in (SERVE, MEASURE)
        if (order is PREPARE or serves) and free:
            self.engines[name] = engine._replace(prepared=True, serving=serves, chosen=serves)
            self.using.add(name)
        if not serves:
            self.engines[name] = self.engines[name]._replace(serving=False)
            self.using.discard(name)
        self.served = self.served or self.engines[name].serving

    def crash(self, name: str) -> None:
        self.engines[name] = {"large": LARGE, "small": SMALL, "other": OTHER}[name]
        self.using.discard(name)


COUNTS = st.sampled_from([{"large": 1, "small": 0}, {"large": 0, "small": 1}, {"large": 0, "small": 2}])


@pytest.mark.slow
@given(
    st.lists(st.one_of(COUNTS, st.sampled_from(["large", "small", "other"])), max_size=12),
    COUNTS,
    st.randoms(),
)
def test_after_any_crashes_and_switches_the_wanted_engines_serve(
    events: list[dict[str, int] | str], wanted: dict[str, int], random: Random
) -> None:
    hosts, awake = Hosts(), wanted
    for event in [*events, wanted]:
        if isinstance(event, str):
            hosts.crash(event)
        else:
            awake = event
        for _ in range(random.randint(0, 4)):
            hosts.turn(random.choice(list(hosts.engines)), awake)
    for _ in range(6):
        for name in random.sample(list(hosts.engines), 3):
            hosts.turn(name, wanted)
    serving = [engine.shape for engine in hosts.engines.values() if engine.serving]
    assert sorted(serving) == [shape for shape, count in sorted(wanted.items()) for _ in range(count)]
