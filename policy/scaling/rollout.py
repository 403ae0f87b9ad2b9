"""From a goal to the next counts: one pure step of a scale, a mode switch or a new generation.

A layer is what one Serve application holds: the replicas of one shape and generation of a model.
The step is computed anew each time from what is observed, so a controller that was restarted in
the middle of a switch goes on with it.

Whether an aim was reached, failed, or would leave a gap: the judgements around a switch."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from policy.config.deployment import ModelSpec

# While shapes change places on CPUs, cores may be claimed twice: threads share them for a moment,
# and no request waits for a cold start.
CPU_OVERCOMMIT = 2


class LayerKey(msgspec.Struct, frozen=True, order=True):
    """One shape of one generation of a model."""

    model: str
    shape: str
    generation: int


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """What is observed of a layer: the count asked for, and its replicas by state.

    ``failures`` counts starts that failed in a row, ``broken`` is the cluster giving up on it.
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
        """Replicas that serve, those included that were not heard of: no data is no reason to act.

        Where starts fail, silence means that there is nothing to hear.
        """
        silent = max(0, self.wanted - self.starting - self.ready)
        return self.ready if self.failures or self.broken else self.ready + silent


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica of a shape takes."""

    gpus: int = 0
    cpus: int = 0


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The layer that should serve alone, and with how many replicas.

    ``gap`` allows a moment with fewer than ``min_healthy`` ready replicas, when the queue can hold it.
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
    goal: Goal,
    layers: Mapping[LayerKey, Layer],
    footprints: Mapping[LayerKey, Footprint],
    gpus: int | None,
    cpus: int | None,
) -> dict[LayerKey, int]:
    """The counts to ask for next, for every layer of the goal's model.

    ``gpus`` and ``cpus`` are what this model may hold in all. Make before break where there is
    room: the others stay whole until the goal is ready. Where there is none, roll by halves: give
    up half of the others, or as many as one new replica needs, once they have drained start what
    fits, and repeat. Never below ``min_healthy`` ready replicas unless the goal allows the gap.
    """
    target = layers.get(goal.key, Layer())
    others = {key: layer for key, layer in layers.items() if key != goal.key}
    counts = {key: layer.wanted for key, layer in others.items()}
    if target.ready >= goal.count:
        counts = dict.fromkeys(others, 0)
        # Scale-downs wait for the switch: while others drain, the goal's layer may carry their load.
        settled = not any(layer.occupied for layer in others.values())
        counts[goal.key] = goal.count if settled else max(goal.count, target.wanted)
        return counts

    counts[goal.key] = min(goal.count, target.wanted + _room(goal, layers, footprints, gpus, cpus))
    grows = counts[goal.key] > target.wanted or target.starting or target.ready < target.wanted
    leaving = any(layer.occupied > layer.wanted for layer in layers.values())
    if not grows and not leaving:
        counts |= _give_way(goal, layers, footprints, gpus, cpus)
    return counts


def _room(
    goal: Goal,
    layers: Mapping[LayerKey, Layer],
    footprints: Mapping[LayerKey, Footprint],
    gpus: int | None,
    cpus: int | None,
) -> int:
    """How many more replicas the goal's layer may have beside everything that holds resources now."""
    each = footprints[goal.key]
    own = layers.get(goal.key, Layer()).occupied
    used_gpus = sum(layer.occupied * footprints[key].gpus for key, layer in layers.items())
    used_cpus = sum(layer.occupied * footprints[key].cpus for key, layer in layers.items())
    free_gpus = None if gpus is None else gpus - used_gpus
    # Overcommitted beside the others, but not by itself: that is how it stays once they are gone.
    free_cpus = None if cpus is None else min(CPU_OVERCOMMIT * cpus - used_cpus, cpus - own * each.cpus)
    return min(fits(free_gpus, each.gpus), fits(free_cpus, each.cpus))


def _give_way(
    goal: Goal,
    layers: Mapping[LayerKey, Layer],
    footprints: Mapping[LayerKey, Footprint],
    gpus: int | None,
    cpus: int | None,
) -> dict[LayerKey, int]:
    """Shrink the others by half, further while not one new replica would fit, less to stay healthy.

    Nothing is given up where that makes no room. Which replicas of a layer leave is not ours to
    choose, so each that leaves is taken to be one that serves.
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
        # First what serves nobody, then the widest.
        key = max((key for key in keep if keep[key]), key=lambda key: (not others[key].ready, keep[key], key))
        fewer = keep | {key: keep[key] - 1}
        if healthy(fewer) < floor:
            break
        keep = fewer
    return keep if room(keep) else {}


# A start that failed this often in a row is not tried again while something else can serve, and a host
# whose engine did gives up its place to a fresh one.
MAX_FAILURES = 3

# What has served this long (seconds) and dies begins a new row of failures.
STABLE_S = 60.0


def reached(count: int, layer: Layer) -> bool:
    """Whether the layer has what was aimed for."""
    return layer.ready >= count


def verdict(layer: Layer, elapsed_s: float, start_timeout_s: float) -> str:
    """Why the aim cannot be had, or an empty string while it still may be.

    A layer in which a replica is ready has shown that it can start, so it gets all of
    ``start_timeout_s`` to have the rest. ``elapsed_s`` counts from when the aim was set.
    """
    if elapsed_s > start_timeout_s:
        return f"not ready after {elapsed_s:.0f} s"
    if layer.ready:
        return ""
    if layer.failures >= MAX_FAILURES:
        return f"{layer.failures} starts in a row failed"
    return "the cluster gave up starting it" if layer.broken else ""


def leaving_layer(spec: ModelSpec, layers: Mapping[LayerKey, Layer], key: LayerKey) -> dict[str, int]:
    """By mode, or by shape where no mode has it, what other layers than ``key`` still hold."""
    modes = {mode.shape: name for name, mode in spec.modes.items()}
    found: dict[str, int] = {}
    for other, layer in layers.items():
        if other != key and layer.occupied:
            name = modes.get(other.shape, other.shape)
            found[name] = found.get(name, 0) + layer.occupied
    return found


def needs_gap(
    goal: Goal,
    layers: Mapping[LayerKey, Layer],
    footprints: Mapping[LayerKey, Footprint],
    gpus: int | None,
    cpus: int | None,
) -> bool:
    """Whether the goal can be had only by falling below ``min_healthy`` ready replicas.

    Plays the switch forward on the planner itself, every step taken to succeed at once; what does
    not serve now is not taken to serve later.
    """
    now = {key: _played(layer, layer.wanted) for key, layer in layers.items()}
    while True:
        own = now.get(goal.key, Layer()).wanted
        now[goal.key] = Layer(wanted=own, ready=own)
        counts = step(goal, now, footprints, gpus, cpus)
        if counts[goal.key] >= goal.count:
            return False
        then = {key: _played(now[key], count) for key, count in counts.items()}
        if then == now:
            return True
        now = then


def _played(layer: Layer, count: int) -> Layer:
    ready = max(0, layer.serving - max(0, layer.wanted - count))
    return Layer(wanted=count, ready=ready, starting=max(0, count - ready))
