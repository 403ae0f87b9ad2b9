"""Whether an aim was reached, failed, or would leave a gap: the judgements around a switch."""

from __future__ import annotations

from collections.abc import Mapping

from policy.config import ModelSpec
from policy.plan import Footprint, Goal, Layer, LayerKey, step

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


def leaving_of(spec: ModelSpec, layers: Mapping[LayerKey, Layer], key: LayerKey) -> dict[str, int]:
    """By mode, or by shape where no mode has it, what other layers than ``key`` still hold."""
    modes = {mode.shape: name for name, mode in spec.modes.items()}
    found: dict[str, int] = {}
    for other, layer in layers.items():
        if other != key and layer.occupied:
            name = modes.get(other.shape, other.shape)
            found[name] = found.get(name, 0) + layer.occupied
    return found


def gap_needed(
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
