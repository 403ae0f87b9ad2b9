"""The rollout of a goal: the next replica counts of a scale-up or -down, a mode switch or a new revision.

A layer is the replicas of one shape and revision of a model (one Serve application). Each step is computed
from what is observed, so a restarted controller continues a switch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from policy.config.deployment import ModelSpec
from policy.scaling.budget_resources import Resources, summed
from policy.types import Replica

# During a switch on CPUs cores may be claimed twice: threads share them, and no request waits for a start.
CPU_OVERCOMMIT = 2
# After this many failed starts in a row, a start is not retried while something else can serve, and a host is
# replaced by a fresh one.
MAX_FAILURES = 3
# A failure after this many seconds of service starts a new row of failures.
STABLE_S = 60.0
# The last part of the drain timeout of a switch, in which replicas that are to drain take nothing new: what
# they took before may take longer than predicted.
CLOSED_SHARE = 0.2


class LayerKey(msgspec.Struct, frozen=True, order=True):
    """One shape of one revision of a model."""

    model: str
    shape: str
    generation: int

    @classmethod
    def of(cls, replica: Replica) -> LayerKey:
        """The layer of a replica."""
        return cls(replica.model, replica.shape, replica.generation)


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """An observed layer: its desired count, and its replicas by state.

    ``failures`` counts failed starts in a row; ``broken`` means that the cluster gave up on it.
    ``unplaced`` replicas wait although their resources are free in sum: no single node has them.
    """

    wanted: int = 0
    starting: int = 0
    ready: int = 0
    draining: int = 0
    failures: int = 0
    broken: bool = False
    unplaced: int = 0

    @property
    def occupied(self) -> int:
        """Replicas that hold resources, or will at once."""
        return max(self.wanted, self.starting + self.ready + self.draining)

    @property
    def serving(self) -> int:
        """Replicas that serve, with those that have not reported, unless starts fail."""
        silent = max(0, self.wanted - self.starting - self.ready)
        return self.ready if self.failures or self.broken else self.ready + silent


class RolloutGoal(msgspec.Struct, frozen=True, kw_only=True):
    """The only layer that should serve, and its replica count.

    ``gap`` allows fewer than ``min_healthy`` ready replicas during the switch. While it is ``closing``, the
    others still take requests that end before the longest one: none is drained yet.
    """

    key: LayerKey
    count: int
    min_healthy: int = 1
    gap: bool = False
    closing: bool = False


class SharedGpus(NamedTuple):
    """A shared GPU group: the ``amount`` is taken as a whole while any of its ``layers`` has replicas."""

    amount: Resources
    layers: frozenset[LayerKey]


class RolloutPlanner(NamedTuple):
    """The steps to a ``goal`` from the observed ``layers`` of its model.

    ``footprints`` are the resources of one replica of each layer, ``bounds`` what the model may hold in all.
    The replicas of a layer in one of the ``groups`` take their resources within the group.
    """

    goal: RolloutGoal
    layers: Mapping[LayerKey, Layer]
    footprints: Mapping[LayerKey, Resources]
    bounds: Resources
    groups: tuple[SharedGpus, ...] = ()

    @property
    def target(self) -> Layer:
        """The goal's own layer."""
        return self.layers.get(self.goal.key, Layer())

    @property
    def others(self) -> dict[LayerKey, Layer]:
        """All layers but the goal's."""
        return {key: layer for key, layer in self.layers.items() if key != self.goal.key}

    def step(self) -> dict[LayerKey, int]:
        """The next counts of all layers of the goal's model.

        Make before break where there is room: other layers stay until the goal is ready. Without room, roll
        by halves: drain half of the others (or what one new replica needs), start what fits, and repeat.
        Never below ``min_healthy`` ready replicas unless the goal allows the gap.
        """
        goal, target, others = self.goal, self.target, self.others
        if target.ready >= goal.count:
            # No scale-down while other layers drain: the goal's layer may carry their load.
            settled = not any(layer.occupied for layer in others.values())
            count = goal.count if settled else max(goal.count, target.wanted)
            return dict.fromkeys(others, 0) | {goal.key: count}
        counts = {key: layer.wanted for key, layer in others.items()}
        if goal.closing and any(layer.ready for layer in others.values()):
            return counts | {goal.key: min(goal.count, target.wanted)}
        counts[goal.key] = min(goal.count, target.wanted + self._room())
        grows = counts[goal.key] > target.wanted or target.starting or target.ready < target.wanted
        leaving = any(layer.occupied > layer.wanted for layer in self.layers.values())
        if target.unplaced and not leaving:
            return counts | self._give_way()
        return counts if grows or leaving else counts | self._scale_down_others()

    def _room(self) -> int:
        """How many more replicas of the goal's layer fit now."""
        each, group = self.footprints[self.goal.key], self._group_of(self.goal.key)
        taken = [other.amount for other in self.groups if other != group and self._taken(other.layers).gpus]
        shared = frozenset[LayerKey]().union(*(group.layers for group in self.groups))
        used = summed([*taken, self._taken(self.layers.keys() - shared)])
        free = self.bounds._replace(cpus=CPU_OVERCOMMIT * self.bounds.cpus).plus(used, -1)
        if group is not None:
            inside = self._taken(group.layers)
            if not inside.gpus and not free.holds(group.amount):
                return 0
            return Resources(group.amount.gpus - inside.gpus).holds(Resources(each.gpus))
        # A layer alone must not overcommit: it stays so after the others have drained.
        own = self.bounds.plus(each, -self.target.occupied)
        return min(free.holds(each), own.holds(each))

    def _taken(self, keys: Collection[LayerKey]) -> Resources:
        """What the replicas of these layers take."""
        layers = ((self.footprints[key], of.occupied) for key, of in self.layers.items() if key in keys)
        return summed(Resources().plus(each, count) for each, count in layers)

    def _group_of(self, key: LayerKey) -> SharedGpus | None:
        return next((group for group in self.groups if key in group.layers), None)

    def _healthy(self, keep: Mapping[LayerKey, int]) -> int:
        """How many replicas serve when the others are scaled to ``keep``.

        Each replica that leaves is assumed to serve: the actuator chooses which.
        """
        left = (max(0, layer.serving - layer.wanted + keep[key]) for key, layer in self.others.items())
        return self.target.ready + sum(left)

    def _fewer(self, keep: Mapping[LayerKey, int]) -> dict[LayerKey, int]:
        """The counts less one: first of layers without a ready replica, then of the largest."""
        _, _, key = max((not self.others[key].ready, count, key) for key, count in keep.items() if count)
        return {**keep, key: keep[key] - 1}

    def _give_way(self) -> dict[LayerKey, int]:
        """Shrink the others by what one new replica needs, or less to stay healthy."""
        goal, each = self.goal, self.footprints[self.goal.key]
        now = {key: layer.wanted for key, layer in self.others.items()}
        keep, floor = now, 0 if goal.gap else min(goal.min_healthy, self._healthy(now))
        while any(keep.values()):
            freed = summed(Resources().plus(self.footprints[key], now[key] - keep[key]) for key in now)
            fewer = self._fewer(keep)
            if freed.holds(each) or self._healthy(fewer) < floor:
                break
            keep = fewer
        return keep

    def _scale_down_others(self) -> dict[LayerKey, int]:
        """Shrink the others by half, or until one new replica fits, less to stay healthy; else not at all."""
        goal, others = self.goal, self.others

        def room(keep: Mapping[LayerKey, int]) -> int:
            after = {key: Layer(wanted=count) for key, count in keep.items()} | {goal.key: self.target}
            return self._replace(layers=after)._room()

        keep = {key: layer.wanted for key, layer in others.items()}
        floor = 0 if goal.gap else min(goal.min_healthy, self._healthy(keep))
        half = sum(keep.values()) // 2
        while any(keep.values()) and (sum(keep.values()) > half or not room(keep)):
            fewer = self._fewer(keep)
            if self._healthy(fewer) < floor:
                break
            keep = fewer
        return keep if room(keep) else {}

    def keeps_others(self, counts: Mapping[LayerKey, int]) -> bool:
        """Whether replicas of other layers than the goal's stay after a step to ``counts``."""
        return any(counts[key] for key in self.others)

    def stops(self) -> bool:
        """Whether the goal needs a moment without any ready replica; as :meth:`needs_gap`."""
        return self._replace(goal=msgspec.structs.replace(self.goal, min_healthy=1)).needs_gap()

    def needs_gap(self) -> bool:
        """Whether the goal needs a moment below ``min_healthy`` ready replicas.

        Simulates the switch with :meth:`step`, each step succeeding at once; replicas that do not serve now
        are assumed never to.
        """
        goal = msgspec.structs.replace(self.goal, gap=False, closing=False)
        now = {key: _simulated(layer, layer.wanted) for key, layer in self.layers.items()}
        while True:
            own = now.get(goal.key, Layer()).wanted
            now[goal.key] = Layer(wanted=own, ready=own)
            counts = self._replace(goal=goal, layers=now).step()
            if counts[goal.key] >= goal.count:
                return False
            then = {key: _simulated(now[key], count) for key, count in counts.items()}
            if then == now:
                return True
            now = then


def closes_s(left_s: float, drain_timeout_s: float, drain_s: float) -> float:
    """In how many seconds of a switch the layers that are to drain take nothing new; 0 if they do not now.

    All ends in ``left_s`` of ``drain_timeout_s`` seconds, and what runs in ``drain_s``, as predicted.
    """
    return max(0.0, min(left_s - CLOSED_SHARE * drain_timeout_s, drain_s))


def reached(count: int, layer: Layer) -> bool:
    """Whether the layer has ``count`` ready replicas."""
    return layer.ready >= count


def verdict(layer: Layer, elapsed_s: float, start_timeout_s: float) -> str:
    """Why the goal, set ``elapsed_s`` ago, has failed; empty while it may still be reached.

    A layer with a ready replica can start, so it gets all of ``start_timeout_s`` for the rest.
    """
    if elapsed_s > start_timeout_s:
        return f"not ready after {elapsed_s:.0f} s"
    if layer.ready:
        return ""
    if layer.failures >= MAX_FAILURES:
        return f"{layer.failures} starts in a row failed"
    return "the cluster gave up starting it" if layer.broken else ""


def leaving_layer(spec: ModelSpec, layers: Mapping[LayerKey, Layer], key: LayerKey) -> dict[str, int]:
    """How many replicas other layers than ``key`` still hold, by mode (or shape, if no mode has it)."""
    modes = {mode.shape: name for name, mode in spec.modes.items()}
    found: dict[str, int] = {}
    for other, layer in layers.items():
        if other != key and layer.occupied:
            name = modes.get(other.shape, other.shape)
            found[name] = found.get(name, 0) + layer.occupied
    return found


def _simulated(layer: Layer, count: int) -> Layer:
    """The layer after it was scaled to ``count``."""
    ready = max(0, layer.serving - max(0, layer.wanted - count))
    return Layer(wanted=count, ready=ready, starting=max(0, count - ready))
