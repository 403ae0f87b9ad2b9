"""The desired counts of models that another autoscaler scales, from the controller's last snapshot."""

from __future__ import annotations

from gateway.routing.fleet import FleetView

# The name of the metric whose value is a count.
METRIC = "tidegate-replicas"


class CountUnknown(Exception):
    """There is no such count; the message says why."""


def desired_count(view: FleetView, model: str, shape: str = "") -> int:
    """The desired replicas of a model, or of one of its shapes; raises :class:`CountUnknown`.

    A "/" in the model's name may be written as ".", as labels of Kubernetes have none.
    """
    if view.source == "none":
        raise CountUnknown("the controller was not seen yet, and no last fleet is on disk")
    known = {each.name: each.counts for each in view.fleet.models if each.counts}
    counts = known.get(model) or {name.replace("/", "."): each for name, each in known.items()}.get(model)
    if counts is None:
        listed = ", ".join(known) or "none"
        raise CountUnknown(f"no model {model!r} is scaled by an autoscaler; models that are: {listed}")
    if shape and shape not in counts:
        raise CountUnknown(f"{model} has no shape {shape!r}; it has {', '.join(counts)}")
    return counts[shape] if shape else sum(counts.values())
