"""Names, resources and reported state of Ray Serve applications; imports no Ray.

Ray reads its token mode when it is imported, so only what has joined a cluster may import it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from policy.config.deployment import Cluster, ModelSpec, Shape
from policy.config.shared_gpus import gpu_group_of
from policy.scaling.reconcile_steps import CPU_OVERCOMMIT, LayerKey
from policy.types import EngineKind
from serve.actuator.interface import ActuatorLayer

# The only deployment of an application.
DEPLOYMENT = "replica"

# The name of an application contains everything that a controller without stored state needs.
_NAME = re.compile(
    r"tidegate-(?P<deployment>\w+)\+(?P<model>[^+]+)\+(?P<shape>[^+]+)\+g(?P<generation>\d+)-(?P<digest>\w+)"
)

_BROKEN = frozenset({"DEPLOY_FAILED", "UNHEALTHY"})

# Serve reports missing resources after 30 s, only as this sentence.
_RESOURCES = re.compile(r"each replica: (?P<each>\{.*?\}), total resources available: (?P<free>\{.*?\})")

SIM_CPUS = 0.01

# The environment of Serve's controller. By default it spreads replicas over nodes, which leaves no node with
# room for a large one. Where it packs them it would also move running replicas off a node after a while: an
# engine is not restarted for that. It says after so many seconds that a replica waits for a node.
SERVE_ENVIRONMENT = {
    "RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY": "1",
    "RAY_SERVE_NODE_COMPACTION_DELAY_S": "1e12",
    "RAY_SERVE_SLOW_STARTUP_WARNING_S": "5",
}


def application_name(deployment: str, key: LayerKey, digest: str) -> str:
    return f"tidegate-{deployment}+{key.model.replace('/', '@')}+{key.shape}+g{key.generation}-{digest}"


def held_layers(
    answer: Mapping[str, Any], deployment_id: str, deploying: Mapping[str, int]
) -> Iterator[tuple[LayerKey, str, ActuatorLayer]]:
    """The layers of a deployment with their application names, of an answer of ``/api/serve/applications/``.

    Serve lists an application before its deployment: until then its count is that of ``deploying``, by name.
    Source of the fields: ``ray.serve.schema.ServeInstanceDetails``, Ray 2.60.
    """
    for name, application in answer["applications"].items():
        match = _NAME.fullmatch(name)
        if match is None or match["deployment"] != deployment_id:
            continue
        if application["status"] in ("DELETING", "NOT_STARTED"):
            continue
        # A controller that was restarted meanwhile knows no count; a layer is deployed with at least one.
        undeployed = {
            "target_num_replicas": deploying.get(name, 1), "message": application["message"], "replicas": [],
        }  # fmt: skip
        deployment = application["deployments"].get(DEPLOYMENT, undeployed)
        key = LayerKey(match["model"].replace("@", "/"), match["shape"], int(match["generation"]))
        yield (
            key,
            name,
            ActuatorLayer(
                wanted=deployment["target_num_replicas"],
                digest=match["digest"],
                trouble=deployment["message"] if application["status"] in _BROKEN else "",
                waits=missing_resources(deployment),
                unplaced=unplaced(deployment) if missing_resources(deployment) else 0,
            ),
        )


def missing_resources(deployment: Mapping[str, Any]) -> str:
    """Why replicas of a deployment wait for a node, empty if none does."""
    waiting = unplaced(deployment)
    found = _RESOURCES.search(deployment["message"])
    if not waiting or found is None:
        return ""
    return f"no node has room for {waiting} of {found['each']}: {found['free']} is free"


def unplaced(deployment: Mapping[str, Any]) -> int:
    """How many replicas of a deployment are on no node yet."""
    replicas = deployment["replicas"]
    return sum(each["state"] == "STARTING" and not each.get("node_id") for each in replicas)


def required_resources(model: ModelSpec, shape: Shape, cluster: Cluster) -> dict[str, Any]:
    """The resources that a host requests of Ray, as options of its actor.

    It requests fractions of cores, so that two shapes can overlap during a switch.
    """
    group = gpu_group_of(model)
    needed: dict[str, Any]
    gpus, cpus = (shape.gpus, shape.cpus) if group is None else (group.gpus, group.cpus)
    simulated = model.engine is EngineKind.SIM
    if simulated and not cluster.simulated_gpus:
        return {"num_gpus": 0, "num_cpus": SIM_CPUS}
    needed = {
        "num_gpus": gpus,
        "num_cpus": SIM_CPUS if simulated else cpus if gpus else cpus / CPU_OVERCOMMIT,
    }
    if shape.accelerator_type:
        needed["accelerator_type"] = shape.accelerator_type
    if shape.resources:
        count = 1 if group is None else group.engines[group.shape]
        needed["resources"] = {name: count * amount for name, amount in shape.resources.items()}
    return needed
