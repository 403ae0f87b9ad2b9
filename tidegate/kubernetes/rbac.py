"""The accounts of pods, and their rights."""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.routing.discovered_server import is_labelled
from policy.config.deployment import Deployment
from tidegate.kubernetes.object_metadata import KubernetesObject, ManifestOptions, named, object_of


def is_scaled(deployment: Deployment) -> bool:
    """Whether a controller scales external models, and runs none itself."""
    return deployment.needs_controller and not deployment.deploys


def access(deployment: Deployment, options: ManifestOptions) -> list[KubernetesObject]:
    """Accounts, with the right to follow endpoints and labels of pods, and, for a controller, to scale."""
    used = _used(deployment, options)
    labelled = [_rule("", "services"), _rule("", "pods")]
    follow = {
        namespace: [_rule("discovery.k8s.io", "endpointslices"), *(labelled if found.reads_pods else ())]
        for namespace, found in used.items()
    }
    scale = {namespace: [*follow[namespace], *_scaling(found.kinds)] for namespace, found in used.items()}
    own = follow if is_scaled(deployment) else scale
    objects = [object_of("v1", "ServiceAccount", options, automountServiceAccountToken=bool(used))]
    objects += _roles(options, options.name, own)
    if is_scaled(deployment):
        name = named(options, "controller")
        account = object_of("v1", "ServiceAccount", options, name=name, automountServiceAccountToken=True)
        if deployment.cluster.election is not None:
            lease = _rule("coordination.k8s.io", "leases", "get", "create", "update")
            scale[options.namespace] = [*scale.get(options.namespace, []), lease]
        objects += [account, *_roles(options, name, scale)]
    return objects


class _Used(NamedTuple):
    """Kinds of workloads that are scaled, and whether the labels of pods say something of servers."""

    kinds: set[str]
    reads_pods: bool


def _used(deployment: Deployment, options: ManifestOptions) -> dict[str, _Used]:
    """What is used of each namespace in which servers are discovered."""
    found: dict[str, _Used] = {}
    for spec in deployment.models:
        service = spec.discovery.kubernetes if spec.discovery is not None else None
        if service is not None and not service.api:
            namespace = service.namespace or options.namespace
            kinds = {shape.workload.partition("/")[0] for shape in spec.shapes.values() if shape.workload}
            before = found.get(namespace, _Used(set(), reads_pods=False))
            found[namespace] = _Used(before.kinds | kinds, before.reads_pods or is_labelled(spec))
    return found


def _scaling(kinds: set[str]) -> list[dict[str, Any]]:
    rules = []
    for kind in sorted(kinds):
        group = "leaderworkerset.x-k8s.io" if kind == "leaderworkerset" else "apps"
        rules += [
            _rule(group, f"{kind}s", "get", "list", "patch"),
            _rule(group, f"{kind}s/scale", "get", "patch"),
        ]
    return [*rules, _rule("", "pods", "get", "list", "watch", "delete")] if kinds else []


def _rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": [*verbs] or ["get", "list", "watch"]}


def _roles(
    options: ManifestOptions, name: str, rules: dict[str, list[dict[str, Any]]]
) -> list[KubernetesObject]:
    """The account ``name`` may do what the ``rules`` of each namespace say."""
    api, objects = "rbac.authorization.k8s.io/v1", []
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    account = {"kind": "ServiceAccount", "name": name, "namespace": options.namespace}
    for namespace in sorted(rules):
        objects += [
            object_of(api, "Role", options, name=name, namespace=namespace, rules=rules[namespace]),
            object_of(
                api, "RoleBinding", options, name=name, namespace=namespace, roleRef=role, subjects=[account]
            ),
        ]
    return objects
