"""Orders to the engines of a shared GPU group: which serve, and which start so that they can be woken.

Engines that share a GPU are never awake together: each host locks its GPUs while its engine uses them. When a
group is first started, the engines that do not serve start first and go to sleep. After a failure those that
are to serve start first; the others wait until their GPUs are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from policy.types import Replica
from policy.wire.heartbeat import GpuCommand


def is_prepared(replica: Replica) -> bool:
    """Whether its engine runs, and has slept and woken once."""
    return bool(replica.url) and replica.wake_s is not None


class GroupEngine(NamedTuple):
    """One engine, on the GPUs ``cards`` of the group.

    ``chosen`` is whether it was last ordered to serve, ``prepared`` whether its process is there with a known
    wake time, ``failed`` whether its last starts failed, ``unhealthy`` whether one of its GPUs fails or is
    throttled.
    """

    id: str
    shape: str
    cards: tuple[int, ...]
    serving: bool = False
    chosen: bool = False
    prepared: bool = False
    failed: bool = False
    unhealthy: bool = False


def chosen_engines(engines: Iterable[GroupEngine], awake: Mapping[str, int]) -> list[GroupEngine]:
    """The engines that serve: as many of each shape as ``awake`` says.

    Those that serve stay, then come those that were chosen before, those on whose GPUs the fewest serve, and
    prepared ones; unhealthy and failed ones are last. Larger shapes choose first. Engines of several shapes
    get different GPUs: of a smaller shape others serve, if theirs are needed.
    """
    known = list(engines)

    def rank(engine: GroupEngine) -> tuple[bool, bool, bool, bool, int, bool, tuple[int, ...], str]:
        return (
            engine.failed,
            engine.unhealthy,
            not engine.serving,
            not engine.chosen,
            sum(other.serving for other in known if _share(engine, other)),
            not engine.prepared,
            engine.cards,
            engine.id,
        )

    ordered = sorted(known, key=lambda engine: (-len(engine.cards), rank(engine)))
    found: list[GroupEngine] = []
    taken: set[int] = set()
    for shape in dict.fromkeys(engine.shape for engine in ordered):
        mine = [engine for engine in ordered if engine.shape == shape]
        # Where the counts exceed the GPUs, the engines that find none free wait for them.
        mine.sort(key=lambda engine: not taken.isdisjoint(engine.cards))
        chosen = mine[: awake.get(shape, 0)]
        found += chosen
        taken.update(card for engine in chosen for card in engine.cards)
    return found


def gpu_commands(
    engines: Sequence[GroupEngine], awake: Mapping[str, int], *, starting: bool
) -> dict[str, GpuCommand]:
    """The order of each engine by id; ``starting`` while no engine of the group has served yet."""
    chosen = chosen_engines(engines, awake)
    found: dict[str, GpuCommand] = {}
    for engine in engines:
        sharing = [other for other in engines if other is not engine and _share(engine, other)]
        if engine not in chosen:
            waits = any(other in chosen and not (starting and not other.serving) for other in sharing)
            found[engine.id] = GpuCommand.SLEEP if waits or engine.prepared else GpuCommand.PREPARE
        elif starting and not engine.prepared:
            first = [other for other in sharing if other not in chosen]
            waits = not all(other.prepared or other.failed for other in first)
            found[engine.id] = GpuCommand.WAIT if waits else GpuCommand.MEASURE
        else:
            found[engine.id] = GpuCommand.SERVE
    return found


def _share(one: GroupEngine, other: GroupEngine) -> bool:
    return not set(one.cards).isdisjoint(other.cards)
