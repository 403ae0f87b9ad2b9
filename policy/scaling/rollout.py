"""The rollout of a goal: the next replica counts of a scale-up or -down, a mode switch or a new revision.

A layer is the replicas of one shape and revision of a model (one Serve application). Each step is computed
from what is observed, so a restarted controller continues a switch.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from policy.config.deployment import ModelSpec

# During a switch on CPUs cores may be claimed twice: threads share them, and no request waits for a start.
CPU_OVERCOMMIT = 2
# After this many failed starts in a row, a start is not retried while something else can serve, and a host is
# replaced by a fresh one.
MAX_FAILURES = 3
# A failure after this many seconds of service starts a new row of failures.
STABLE_S = 60.0


class LayerKey(msgspec.Struct, frozen=True, order=True):
    """One shape of one revision of a model."""

    model: str
    shape: str
    generation: int


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """An observed layer: its desired count, and its replicas by state.

    ``failures`` counts failed starts in a row; ``broken`` means that the cluster gave up on it.
    """

    wanted: int = 0
    starting: int = 0
    ready: int = 0
    draining: int = 0
    failures: int = 0
    broken: bool = False

    @property
    def occupied(self) -> int:
        """Replicas that hold resources, or will at once."""
        return max(self.wanted, self.starting + self.ready + self.draining)

    @property
    def serving(self) -> int:
        """Replicas that serve, with those that have not reported, unless starts fail."""
        silent = max(0, self.wanted - self.starting - self.ready)
        return self.ready if self.failures or self.broken else self.ready + silent


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs and cores of one replica."""

    gpus: int = 0
    cpus: int = 0


Layers = Mapping[LayerKey, Layer]
Footprints = Mapping[LayerKey, Footprint]


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The only layer that should serve, and its replica count.

    ``gap`` allows fewer than ``min_healthy`` ready replicas during the switch.
    """

    key: LayerKey
    count: int
    min_healthy: int = 1
    gap: bool = False


def fits(free: int | None, each: int) -> int:
    """How many more replicas that take ``each`` fit into ``free``; ``None`` is unbounded."""
    if free is None or each == 0:
        return 1 << 30
    return max(0, free // each)


def step(
    goal: Goal, layers: Layers, footprints: Footprints, gpus: int | None, cpus: int | None
) -> dict[LayerKey, int]:
    """The next counts of all layers of the goal's model, which may hold ``gpus`` and ``cpus`` in all.

    Make before break where there is room: other layers stay until the goal is ready. Without room, roll by
    halves: drain half of the others (or what one new replica needs), start what fits, and repeat. Never below
    ``min_healthy`` ready replicas unless the goal allows the gap.
    """
    target = layers.get(goal.key, Layer())
    others = {key: layer for key, layer in layers.items() if key != goal.key}
    counts = {key: layer.wanted for key, layer in others.items()}
    if target.ready >= goal.count:
        counts = dict.fromkeys(others, 0)
        # No scale-down while other layers drain: the goal's layer may carry their load.
        settled = not any(layer.occupied for layer in others.values())
        counts[goal.key] = goal.count if settled else max(goal.count, target.wanted)
        return counts

    counts[goal.key] = min(goal.count, target.wanted + _room(goal, layers, footprints, gpus, cpus))
    grows = counts[goal.key] > target.wanted or target.starting or target.ready < target.wanted
    leaving = any(layer.occupied > layer.wanted for layer in layers.values())
    if not grows and not leaving:
        counts |= _give_way(goal, layers, footprints, gpus, cpus)
    return counts


def _room(goal: Goal, layers: Layers, footprints: Footprints, gpus: int | None, cpus: int | None) -> int:
    """How many more replicas of the goal's layer fit now."""
    each = footprints[goal.key]
    own = layers.get(goal.key, Layer()).occupied
    used_gpus = sum(layer.occupied * footprints[key].gpus for key, layer in layers.items())
    used_cpus = sum(layer.occupied * footprints[key].cpus for key, layer in layers.items())
    free_gpus = None if gpus is None else gpus - used_gpus
    # A layer alone must not overcommit: it stays so after the others have drained.
    free_cpus = None if cpus is None else min(CPU_OVERCOMMIT * cpus - used_cpus, cpus - own * each.cpus)
    return min(fits(free_gpus, each.gpus), fits(free_cpus, each.cpus))


def _give_way(
    goal: Goal, layers: Layers, footprints: Footprints, gpus: int | None, cpus: int | None
) -> dict[LayerKey, int]:
    """Shrink the others by half, further until one new replica fits, less to stay healthy; else not at all.

    Each replica that leaves is assumed to serve: the actuator chooses which.
    """
    target = layers.get(goal.key, Layer())
    others = {key: layer for key, layer in layers.items() if key != goal.key}

    def healthy(keep: Mapping[LayerKey, int]) -> int:
        left = (max(0, layer.serving - layer.wanted + keep[key]) for key, layer in others.items())
        return target.ready + sum(left)

    def room(keep: Mapping[LayerKey, int]) -> int:
        after = {key: Layer(wanted=count) for key, count in keep.items()} | {goal.key: target}
        return _room(goal, after, footprints, gpus, cpus)

    keep = {key: layer.wanted for key, layer in others.items()}
    floor = 0 if goal.gap else min(goal.min_healthy, healthy(keep))
    half = sum(keep.values()) // 2
    while any(keep.values()) and (sum(keep.values()) > half or not room(keep)):
        # First layers without a ready replica, then the largest.
        key = max((key for key in keep if keep[key]), key=lambda key: (not others[key].ready, keep[key], key))
        fewer = keep | {key: keep[key] - 1}
        if healthy(fewer) < floor:
            break
        keep = fewer
    return keep if room(keep) else {}


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


def needs_gap(goal: Goal, layers: Layers, footprints: Footprints, gpus: int | None, cpus: int | None) -> bool:
    """Whether the goal needs a moment below ``min_healthy`` ready replicas.

    Simulates the switch with :func:`step`, each step succeeding at once; replicas that do not serve now are
    assumed never to.
    """
    now = {key: _simulated(layer, layer.wanted) for key, layer in layers.items()}
    while True:
        own = now.get(goal.key, Layer()).wanted
        now[goal.key] = Layer(wanted=own, ready=own)
        counts = step(goal, now, footprints, gpus, cpus)
        if counts[goal.key] >= goal.count:
            return False
        then = {key: _simulated(now[key], count) for key, count in counts.items()}
        if then == now:
            return True
        now = then


def _simulated(layer: Layer, count: int) -> Layer:
    ready = max(0, layer.serving - max(0, layer.wanted - count))
    return Layer(wanted=count, ready=ready, starting=max(0, count - ready))
