"""The accounts of pods, and their rights."""

from __future__ import annotations

from typing import Any

from policy.config.deployment import Deployment
from tidegate.kubernetes.objects import Manifest, Options, named, object_of


def is_scaled(deployment: Deployment) -> bool:
    """Whether a controller scales external models, and runs none itself."""
    return deployment.needs_controller and not deployment.deploys


def access(deployment: Deployment, options: Options) -> list[Manifest]:
    """Accounts, with the right to follow endpoints, and, where a controller runs, to scale."""
    kinds = _kinds(deployment, options)
    follow = {namespace: [_rule("discovery.k8s.io", "endpointslices")] for namespace in kinds}
    scale = {namespace: [*follow[namespace], *_scaling(found)] for namespace, found in kinds.items()}
    own = follow if is_scaled(deployment) else scale
    objects = [object_of("v1", "ServiceAccount", options, automountServiceAccountToken=bool(kinds))]
    objects += _roles(options, options.name, own)
    if is_scaled(deployment):
        name = named(options, "controller")
        account = object_of("v1", "ServiceAccount", options, name=name, automountServiceAccountToken=True)
        if deployment.cluster.election is not None:
            lease = _rule("coordination.k8s.io", "leases", "get", "create", "update")
            scale[options.namespace] = [*scale.get(options.namespace, []), lease]
        objects += [account, *_roles(options, name, scale)]
    return objects


def _kinds(deployment: Deployment, options: Options) -> dict[str, set[str]]:
    """By namespace in which servers are discovered: the kinds of the workloads there that are scaled."""
    found: dict[str, set[str]] = {}
    for spec in deployment.models:
        service = spec.discovery.kubernetes if spec.discovery is not None else None
        if service is not None and not service.api:
            here = found.setdefault(service.namespace or options.namespace, set())
            here.update(shape.workload.partition("/")[0] for shape in spec.shapes.values())
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


def _roles(options: Options, name: str, rules: dict[str, list[dict[str, Any]]]) -> list[Manifest]:
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
