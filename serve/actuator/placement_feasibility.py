"""The resources of nodes, and whether any node has room for a replica: all of one is on one node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from policy.config.deployment import Deployment
from policy.config.engine_revision import used_shapes
from policy.errors import ConfigError
from policy.types import EngineKind
from serve.actuator.interface import NodeResources
from serve.actuator.serve_application_status import required_resources


def check_placeable(deployment: Deployment, nodes: Sequence[NodeResources]) -> None:
    """Raise :class:`policy.errors.ConfigError` for a shape in use that fits on none of the ``nodes``."""
    for i, spec in enumerate(deployment.models):
        if spec.engine is EngineKind.EXTERNAL or not nodes:
            continue
        for name, shape in used_shapes(spec).items():
            needed = _by_resource(required_resources(spec, shape, deployment.cluster))
            if any(all(node.has(key) >= amount for key, amount in needed.items()) for node in nodes):
                continue
            path, most = f"models[{i}].shapes.{name}", max(node.has("GPU") for node in nodes)
            if needed["GPU"] > most >= shape.gpus:
                expected = (
                    f"at most {most:g} GPUs in any mode, those of the largest node: engines that share GPUs"
                    " are on one node (control.mode.sleep: never starts and stops engines instead)"
                )
                raise ConfigError(f"models[{i}].modes", f"{needed['GPU']:g} GPUs", expected)
            if needed["GPU"] > most:
                expected = f"at most {most:g}, the GPUs of the largest node: a replica is on one node"
                raise ConfigError(f"{path}.gpus", shape.gpus, expected)
            raise ConfigError(path, needed, f"resources that one node has: {_listed(nodes, needed)}")


def _by_resource(options: Mapping[str, Any]) -> dict[str, float]:
    """The options of a Ray actor as amounts of the resources of nodes."""
    needed = {"GPU": float(options["num_gpus"]), "CPU": float(options["num_cpus"])}
    if kind := options.get("accelerator_type"):
        # Ray takes this much of the resource that it gives such nodes.
        needed[f"accelerator_type:{kind}"] = 0.001
    return {**needed, **options.get("resources", {})}


def _listed(nodes: Sequence[NodeResources], needed: Mapping[str, float]) -> str:
    return "; ".join(", ".join(f"{key} {node.has(key):g}" for key in needed) for node in nodes)


def machine(cards: Sequence[str]) -> tuple[NodeResources, ...]:
    """The only node without Ray, by its GPUs: all else is not counted. None if no GPU was found."""
    return (NodeResources(resources={"GPU": float(len(cards))}, others=math.inf),) if cards else ()


def node_sizes() -> tuple[NodeResources, ...]:
    """The nodes of the cluster that this process has joined; none if an autoscaler may add others. Blocks."""
    import ray  # noqa: PLC0415  # only what has joined a cluster may load Ray
    from ray._private.state import state as cluster_state  # noqa: PLC0415

    if cluster_state.get_max_resources_from_cluster_config() is not None:
        return ()
    return tuple(NodeResources(resources=node["Resources"]) for node in ray.nodes() if node["Alive"])
