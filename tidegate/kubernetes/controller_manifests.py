"""Controllers of models that are scaled: one alone, or several that elect their leader by a Lease.

Several are a StatefulSet: each pod has a name of its own, and gateways know all of them.
"""

from __future__ import annotations

from typing import Any

from policy.config.convert import require
from policy.config.deployment import Deployment
from tidegate.kubernetes.object_metadata import (
    INSTANCE,
    KubernetesObject,
    ManifestOptions,
    labels_of,
    named,
    object_of,
)

ROLE = "controller"


def port(deployment: Deployment) -> int:
    """The port of ``cluster.controller``."""
    return int(deployment.cluster.controller.rpartition(":")[2])


def count(deployment: Deployment, options: ManifestOptions) -> int:
    """How many there are: as asked for, or as the deployment file names."""
    return max(options.controllers, len(deployment.cluster.controllers))


def cluster(deployment: Deployment, options: ManifestOptions) -> dict[str, Any]:
    """The section ``cluster`` of the pods; raises :class:`policy.errors.ConfigError` without a database."""
    election, number = deployment.cluster.election, port(deployment)
    if election is None and options.controllers == 1:
        return {"controller": f"0.0.0.0:{number}"}
    served = "postgresql://HOST/NAME, where several controllers keep their state"
    require(deployment.store.startswith("postgresql"), "store", deployment.store, served)
    found: dict[str, Any] = {"controller": ",".join(_names(deployment, options))}
    if election is None or election.kubernetes is None:
        lease: dict[str, Any] = {"kubernetes": {"name": named(options, ROLE)}}
        found["leader_election"] = lease if election is None else {"lease_s": election.lease_s} | lease
    return found


def _names(deployment: Deployment, options: ManifestOptions) -> list[str]:
    name, number = named(options, ROLE), port(deployment)
    return [f"{name}-{each}.{name}:{number}" for each in range(count(deployment, options))]


def addresses(deployment: Deployment, options: ManifestOptions) -> str:
    """Where gateways find them."""
    if deployment.cluster.election is not None:
        return ",".join(_names(deployment, options))
    return f"{named(options, ROLE)}:{port(deployment)}"


def arguments(deployment: Deployment, options: ManifestOptions, file: str) -> list[str]:
    """The command of one of several controllers."""
    # The pod's name may not be known to the cluster's DNS yet when it starts.
    own = f"$(POD_NAME).{named(options, ROLE)}:{port(deployment)}"
    return ["controller", file, "--address", own, "--host", "0.0.0.0", "--watch"]


def network(deployment: Deployment, options: ManifestOptions) -> list[KubernetesObject]:
    """The addresses of the controllers, and who reaches them."""
    name, labels = named(options, ROLE), labels_of(options, ROLE)
    # Without an address of its own: names of pods, and of one controller alone.
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{"name": "controller", "port": port(deployment), "targetPort": "controller"}],
    }
    instance = {"podSelector": {"matchLabels": {INSTANCE: options.name}}}
    rules = [{"ports": [{"port": "controller"}], "from": [instance]}]
    if deployment.cluster.election is None:
        rules.append({"ports": [{"port": "admin"}], "from": [{"podSelector": {}}]})
    policy = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": rules}
    return [
        object_of("v1", "Service", options, name=name, spec=spec),
        object_of("networking.k8s.io/v1", "NetworkPolicy", options, name=name, spec=policy),
    ]
