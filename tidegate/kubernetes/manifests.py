"""The manifests of a deployment file.

With external models gateways are a Deployment that scales; models that Tidegate starts itself run in one pod
with their GPUs or cores, without Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from policy.config.deployment import Deployment
from policy.config.external_servers import KubernetesService

Manifest = dict[str, Any]

STATE, CACHE = "/var/lib/tidegate", "/var/cache/tidegate"
CONFIG, SECRET = "/etc/tidegate", "/etc/tidegate-secret"
FILE = "deployment.yaml"
# The image's user.
USER = 10001
# Memory of a gateway worker, and of the supervisor with the accounting process, in MiB.
WORKER_MIB, OTHERS_MIB = 256, 512
# Between SIGTERM and SIGKILL beyond the drains.
SPARE_S = 15
MAX_GATEWAYS = 10


@dataclass(frozen=True)
class Options:
    """The ``name`` of all objects, their ``namespace``, the ``image``, and the least number of gateways."""

    name: str
    namespace: str
    image: str
    gateways: int = 2
    service_monitor: bool = False


@dataclass(frozen=True)
class Manifests:
    """The objects, and ``notes`` on what must be there beside them."""

    objects: list[Manifest]
    notes: list[str]


def manifests(raw: dict[str, Any], deployment: Deployment, options: Options) -> Manifests:
    """The manifests of ``deployment``, whose file's content is ``raw``."""
    is_external = not deployment.needs_controller
    objects = [
        _object("v1", "ServiceAccount", options, automountServiceAccountToken=bool(_services(deployment))),
        *_access(deployment, options),
        _object("v1", "ConfigMap", options, data={FILE: yaml.safe_dump(raw, sort_keys=False)}),
        _workload(deployment, options),
        _service(options, options.name, "http", deployment.gateway.port),
        _service(options, f"{options.name}-admin", "admin", deployment.gateway.admin_port),
        _network_policy(deployment, options),
    ]
    if is_external:
        objects += [_disruption_budget(options), _autoscaler(options)]
    else:
        objects += [_claim(options, "state", "10Gi"), _claim(options, "cache", "100Gi")]
    if options.service_monitor:
        objects.append(_service_monitor(options))
    return Manifests(objects, _notes(deployment, options))


def _workload(deployment: Deployment, options: Options) -> Manifest:
    is_external = not deployment.needs_controller
    labels = _labels(options)
    spec: dict[str, Any] = {
        "replicas": options.gateways if is_external else 1,
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {
                "serviceAccountName": options.name,
                "terminationGracePeriodSeconds": grace_s(deployment),
                "securityContext": {
                    "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [_container(deployment, options)],
                "volumes": _volumes(options, is_external=is_external),
            },
        },
    }  # fmt: skip
    if is_external:
        spec["strategy"] = {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
        spec["template"]["spec"]["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
        ]
    else:
        # Two pods would need the GPUs twice, and the state directory has one supervisor.
        spec["strategy"] = {"type": "Recreate"}
    return _object("apps/v1", "Deployment", options, spec=spec)


def _container(deployment: Deployment, options: Options) -> dict[str, Any]:
    gateway = deployment.gateway
    ports = {"http": gateway.port, "admin": gateway.admin_port}
    if deployment.endpoint_picker is not None:
        ports["picker"] = deployment.endpoint_picker.port
    arguments = ["run", f"{CONFIG}/{FILE}", "--watch", *(["--no-ray"] if deployment.needs_controller else [])]
    mounts = {"state": STATE, "tmp": "/tmp", "config": CONFIG, "secret": SECRET}  # noqa: S108 - a volume
    if deployment.needs_controller:
        mounts |= {"cache": CACHE, "shm": "/dev/shm"}  # noqa: S108 - as above
    scheme = "HTTP" if gateway.admin_tls is None else "HTTPS"
    return {
        "name": "tidegate",
        "image": options.image,
        "args": arguments,
        "env": [
            {"name": "TIDEGATE_STATE_DIR", "value": STATE},
            {"name": "TIDEGATE_SECRET_FILE", "value": f"{SECRET}/secret"},
            {"name": "TIDEGATE_GATEWAY_HOST", "value": "0.0.0.0"},
            {"name": "TIDEGATE_ADMIN_HOST", "value": "0.0.0.0"},
            {"name": "XDG_CACHE_HOME", "value": "/var/cache"},
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "startupProbe": _probe("/livez", scheme, periodSeconds=2, failureThreshold=60),
        "livenessProbe": _probe("/livez", scheme, periodSeconds=10, failureThreshold=3),
        "readinessProbe": _probe("/readyz", scheme, periodSeconds=2, failureThreshold=1),
        "resources": _resources(deployment),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": name, "mountPath": path} | ({"readOnly": True} if name in ("config", "secret") else {})
            for name, path in mounts.items()
        ],
    }


def _probe(path: str, scheme: str, **times: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "admin", "scheme": scheme}, "timeoutSeconds": 5, **times}


def _resources(deployment: Deployment) -> dict[str, Any]:
    workers, budget = deployment.gateway.workers, deployment.budget
    cpus, memory = workers + (budget.cpus or 0), f"{OTHERS_MIB + WORKER_MIB * workers}Mi"
    if not deployment.needs_controller:
        return {"requests": {"cpu": str(workers), "memory": memory}, "limits": {"memory": memory}}
    # How much memory an engine takes depends on its model: a limit here would be a guess that ends pods.
    wanted: dict[str, Any] = {"requests": {"cpu": str(cpus), "memory": memory}}
    if budget.gpus:
        wanted["limits"] = {"nvidia.com/gpu": str(budget.gpus)}
    return wanted


def _volumes(options: Options, *, is_external: bool) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": options.name}},
        {"name": "secret", "secret": {"secretName": secret_name(options)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if is_external:
        return [*volumes, {"name": "state", "emptyDir": {}}]
    claimed = [
        {"name": each, "persistentVolumeClaim": {"claimName": f"{options.name}-{each}"}}
        for each in ("state", "cache")
    ]
    return [*volumes, *claimed, {"name": "shm", "emptyDir": {"medium": "Memory"}}]


def grace_s(deployment: Deployment) -> int:
    """How long a pod has to end: as long as its gateway and its replicas drain."""
    gateway = deployment.gateway
    own = deployment.models if deployment.needs_controller else ()
    replicas_s = max((spec.control.mode.drain_timeout_s for spec in own), default=0.0)
    return int(gateway.drain_delay_s + gateway.drain_timeout_s + replicas_s) + SPARE_S


def secret_name(options: Options) -> str:
    """The secret with the file ``secret``, which the pods of a deployment share."""
    return f"{options.name}-secret"


def _service(options: Options, name: str, port: str, number: int) -> Manifest:
    spec = {"selector": _labels(options), "ports": [{"name": port, "port": number, "targetPort": port}]}
    return _object("v1", "Service", options, name=name, labels={"tidegate.io/port": port}, spec=spec)


def _network_policy(deployment: Deployment, options: Options) -> Manifest:
    """The client port is open; the admin port and the picker to the deployment's own namespace."""
    inside: list[dict[str, Any]] = [{"podSelector": {}}]
    rules: list[dict[str, Any]] = [
        {"ports": [{"port": "http"}]},
        {"ports": [{"port": "admin"}], "from": inside},
    ]
    if deployment.endpoint_picker is not None:
        rules.append({"ports": [{"port": "picker"}], "from": inside})
    spec = {"podSelector": {"matchLabels": _labels(options)}, "policyTypes": ["Ingress"], "ingress": rules}
    return _object("networking.k8s.io/v1", "NetworkPolicy", options, spec=spec)


def _disruption_budget(options: Options) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(options)}}
    return _object("policy/v1", "PodDisruptionBudget", options, spec=spec)


def _autoscaler(options: Options) -> Manifest:
    """Gateways by processor time; streams that run keep a gateway for as long as they drain."""
    target = {"type": "Utilization", "averageUtilization": 70}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": options.name},
        "minReplicas": options.gateways,
        "maxReplicas": max(options.gateways, MAX_GATEWAYS),
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return _object("autoscaling/v2", "HorizontalPodAutoscaler", options, spec=spec)


def _claim(options: Options, volume: str, size: str) -> Manifest:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    return _object("v1", "PersistentVolumeClaim", options, name=f"{options.name}-{volume}", spec=spec)


def _service_monitor(options: Options) -> Manifest:
    spec = {
        "selector": {"matchLabels": {**_labels(options), "tidegate.io/port": "admin"}},
        "endpoints": [{"port": "admin", "path": "/metrics", "interval": "15s"}],
    }
    return _object("monitoring.coreos.com/v1", "ServiceMonitor", options, spec=spec)


def _services(deployment: Deployment) -> list[KubernetesService]:
    """The services whose pods are followed with the rights of the gateway's own pod."""
    found = [spec.discovery.kubernetes for spec in deployment.models if spec.discovery is not None]
    return [service for service in found if service is not None and not service.api]


def _access(deployment: Deployment, options: Options) -> list[Manifest]:
    """The right to follow the endpoints of the services in which servers are discovered."""
    objects = []
    for namespace in sorted({each.namespace or options.namespace for each in _services(deployment)}):
        rule = {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": options.name}
        account = {"kind": "ServiceAccount", "name": options.name, "namespace": options.namespace}
        api = "rbac.authorization.k8s.io/v1"
        objects += [
            _object(api, "Role", options, namespace=namespace, rules=[rule]),
            _object(api, "RoleBinding", options, namespace=namespace, roleRef=role, subjects=[account]),
        ]
    return objects


def _notes(deployment: Deployment, options: Options) -> list[str]:
    name = secret_name(options)
    notes = [
        f"the pods share a secret: kubectl -n {options.namespace} create secret generic {name}"
        " --from-literal=secret=$(openssl rand -hex 32)"
    ]
    if not deployment.needs_controller and not deployment.store:
        notes.append("keys made by command need `store: postgresql://...`: each pod has its own database")
    if not deployment.tenants and not deployment.gateway.allow_unauthenticated:
        notes.append("there are no tenants: pods start once there is a key, or gateway.allow_unauthenticated")
    if deployment.needs_controller:
        notes.append("the models run in one pod, on one node")
    return notes


def as_yaml(objects: list[Manifest]) -> str:
    """The objects as one YAML stream."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Without anchors, and with texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _labels(options: Options) -> dict[str, str]:
    return {"app.kubernetes.io/name": "tidegate", "app.kubernetes.io/instance": options.name}


def _object(
    api: str, kind: str, options: Options, *, name: str = "", namespace: str = "",
    labels: dict[str, str] | None = None, **content: Any,
) -> Manifest:  # fmt: skip
    metadata = {
        "name": name or options.name,
        "namespace": namespace or options.namespace,
        "labels": _labels(options) | (labels or {}),
    }
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}
