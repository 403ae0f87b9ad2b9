"""The manifests of a deployment file.

With external models gateways are a Deployment that scales, with a controller beside them where the models are
scaled. Models that Tidegate starts itself run in one pod with their GPUs or cores, without Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from policy.config.deployment import Deployment
from policy.config.ports import is_loopback
from tidegate.kubernetes.access import access, is_scaled
from tidegate.kubernetes.objects import INSTANCE, Manifest, Options, labels_of, named, object_of

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
class Manifests:
    """The objects, and ``notes`` on what must be there beside them."""

    objects: list[Manifest]
    notes: list[str]


@dataclass(frozen=True)
class _Part:
    """Pods of one kind: their ``arguments``, whether they ``scale``, have the file, and run models."""

    arguments: list[str]
    role: str = ""
    scales: bool = False
    has_file: bool = True
    has_models: bool = False


def manifests(raw: dict[str, Any], deployment: Deployment, options: Options) -> Manifests:
    """The manifests of ``deployment``, whose file's content is ``raw``."""
    parts = _parts(deployment, options)
    if is_scaled(deployment):
        # It has an address of its own, by which gateways of other pods find it.
        port = controller_port(deployment)
        raw = {**raw, "cluster": {**raw.get("cluster", {}), "controller": f"0.0.0.0:{port}"}}
    objects = [
        *access(deployment, options),
        object_of("v1", "ConfigMap", options, data={FILE: yaml.safe_dump(raw, sort_keys=False)}),
        *(_workload(deployment, options, part) for part in parts),
        _service(options, options.name, {"http": deployment.gateway.port}),
        _service(
            options,
            f"{options.name}-admin",
            {"admin": deployment.gateway.admin_port, **_grpc_ports(deployment)},
        ),
        _network_policy(deployment, options),
    ]
    if is_scaled(deployment):
        objects += [*_controller(deployment, options), _claim(options, "state", "10Gi")]
    if deployment.deploys:
        objects += [_claim(options, "state", "10Gi"), _claim(options, "cache", "100Gi")]
    else:
        objects += [_disruption_budget(options), _autoscaler(options)]
    if options.service_monitor:
        objects.append(_service_monitor(options))
    return Manifests(objects, _notes(deployment, options))


def controller_port(deployment: Deployment) -> int:
    """The port of ``cluster.controller``."""
    return int(deployment.cluster.controller.rpartition(":")[2])


def _parts(deployment: Deployment, options: Options) -> list[_Part]:
    run = ["run", f"{CONFIG}/{FILE}", "--watch"]
    if deployment.deploys:
        return [_Part([*run, "--no-ray"], has_models=True)]
    if not deployment.needs_controller:
        return [_Part(run, scales=True)]
    follow = [
        *("gateway", "--controller", f"{options.name}-controller:{controller_port(deployment)}"),
        *("--secret-file", f"{SECRET}/secret", "--host", "0.0.0.0", "--admin-host", "0.0.0.0"),
    ]
    return [_Part(follow, scales=True, has_file=False), _Part(run, role="controller")]


def _workload(deployment: Deployment, options: Options, part: _Part) -> Manifest:
    labels = labels_of(options, part.role)
    spec: dict[str, Any] = {
        "replicas": options.gateways if part.scales else 1,
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {
                "serviceAccountName": named(options, part.role),
                "terminationGracePeriodSeconds": grace_s(deployment),
                "securityContext": {
                    "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [_container(deployment, options, part)],
                "volumes": _volumes(options, part),
            },
        },
    }  # fmt: skip
    if part.scales:
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
    return object_of("apps/v1", "Deployment", options, name=named(options, part.role), spec=spec)


def _container(deployment: Deployment, options: Options, part: _Part) -> dict[str, Any]:
    gateway = deployment.gateway
    ports = {"http": gateway.port, "admin": gateway.admin_port, **_grpc_ports(deployment)}
    if part.role:
        ports["controller"] = controller_port(deployment)
    mounts = {"state": STATE, "tmp": "/tmp"}  # noqa: S108 - a volume
    if part.has_file:
        mounts["config"] = CONFIG
    mounts["secret"] = SECRET
    if part.has_models:
        mounts |= {"cache": CACHE, "shm": "/dev/shm"}  # noqa: S108 - as above
    scheme = "HTTP" if gateway.admin_tls is None else "HTTPS"
    return {
        "name": "tidegate",
        "image": options.image,
        "args": part.arguments,
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
        "resources": _resources(deployment, part),
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


def _resources(deployment: Deployment, part: _Part) -> dict[str, Any]:
    workers, budget = deployment.gateway.workers, deployment.budget
    memory = f"{OTHERS_MIB + WORKER_MIB * workers}Mi"
    if not part.has_models:
        return {"requests": {"cpu": str(workers), "memory": memory}, "limits": {"memory": memory}}
    # How much memory an engine takes depends on its model: a limit here would be a guess that ends pods.
    wanted: dict[str, Any] = {"requests": {"cpu": str(workers + (budget.cpus or 0)), "memory": memory}}
    if budget.gpus:
        wanted["limits"] = {"nvidia.com/gpu": str(budget.gpus)}
    return wanted


def _volumes(options: Options, part: _Part) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = []
    if part.has_file:
        volumes.append({"name": "config", "configMap": {"name": options.name}})
    volumes += [
        {"name": "secret", "secret": {"secretName": secret_name(options)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if part.scales:
        return [*volumes, {"name": "state", "emptyDir": {}}]
    kept = ("state", "cache") if part.has_models else ("state",)
    volumes += [
        {"name": each, "persistentVolumeClaim": {"claimName": f"{options.name}-{each}"}} for each in kept
    ]
    return [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory"}}] if part.has_models else volumes


def grace_s(deployment: Deployment) -> int:
    """How long a pod has to end: as long as its gateway and its replicas drain."""
    gateway = deployment.gateway
    own = deployment.models if deployment.deploys else ()
    replicas_s = max((spec.control.mode.drain_timeout_s for spec in own), default=0.0)
    return int(gateway.drain_delay_s + gateway.drain_timeout_s + replicas_s) + SPARE_S


def secret_name(options: Options) -> str:
    """The secret with the file ``secret``, which the pods of a deployment share."""
    return f"{options.name}-secret"


def _grpc_ports(deployment: Deployment) -> dict[str, int]:
    """The gRPC ports by the part of their section that names a port in Kubernetes: `picker`, `scaler`."""
    return {name.rpartition("_")[2]: port.port for name, port in deployment.grpc_ports.items()}


def _service(options: Options, name: str, ports: dict[str, int]) -> Manifest:
    listed = [{"name": port, "port": number, "targetPort": port} for port, number in ports.items()]
    spec, labels = {"selector": labels_of(options), "ports": listed}, {"tidegate.io/port": next(iter(ports))}
    return object_of("v1", "Service", options, name=name, labels=labels, spec=spec)


def _network_policy(deployment: Deployment, options: Options) -> Manifest:
    """The client port is open, the scaler to the cluster, others to the deployment's own namespace."""
    inside: list[dict[str, Any]] = [{"podSelector": {}}]
    rules: list[dict[str, Any]] = [
        {"ports": [{"port": "http"}]},
        {"ports": [{"port": "admin"}], "from": inside},
    ]
    for port in _grpc_ports(deployment):
        # KEDA has a namespace of its own.
        allowed = [{"namespaceSelector": {}}] if port == "scaler" else inside
        rules.append({"ports": [{"port": port}], "from": allowed})
    spec = {"podSelector": {"matchLabels": labels_of(options)}, "policyTypes": ["Ingress"], "ingress": rules}
    return object_of("networking.k8s.io/v1", "NetworkPolicy", options, spec=spec)


def _disruption_budget(options: Options) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels_of(options)}}
    return object_of("policy/v1", "PodDisruptionBudget", options, spec=spec)


def _autoscaler(options: Options) -> Manifest:
    """Gateways by processor time; streams that run keep a gateway for as long as they drain."""
    target = {"type": "Utilization", "averageUtilization": 70}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": options.name},
        "minReplicas": options.gateways,
        "maxReplicas": max(options.gateways, MAX_GATEWAYS),
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return object_of("autoscaling/v2", "HorizontalPodAutoscaler", options, spec=spec)


def _claim(options: Options, volume: str, size: str) -> Manifest:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    return object_of("v1", "PersistentVolumeClaim", options, name=f"{options.name}-{volume}", spec=spec)


def _service_monitor(options: Options) -> Manifest:
    spec = {
        "selector": {"matchLabels": {**labels_of(options), "tidegate.io/port": "admin"}},
        "endpoints": [{"port": "admin", "path": "/metrics", "interval": "15s"}],
    }
    return object_of("monitoring.coreos.com/v1", "ServiceMonitor", options, spec=spec)


def _controller(deployment: Deployment, options: Options) -> list[Manifest]:
    """The address of the controller, and who reaches it."""
    port, name = controller_port(deployment), named(options, "controller")
    # Without an address of its own: there is one pod.
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels_of(options, "controller"),
        "ports": [{"name": "controller", "port": port, "targetPort": "controller"}],
    }
    instance = {"podSelector": {"matchLabels": {INSTANCE: options.name}}}
    rules = [
        {"ports": [{"port": "controller"}], "from": [instance]},
        {"ports": [{"port": "admin"}], "from": [{"podSelector": {}}]},
    ]
    policy = {
        "podSelector": {"matchLabels": labels_of(options, "controller")},
        "policyTypes": ["Ingress"],
        "ingress": rules,
    }
    return [
        object_of("v1", "Service", options, name=name, spec=spec),
        object_of("networking.k8s.io/v1", "NetworkPolicy", options, name=name, spec=policy),
    ]


def _notes(deployment: Deployment, options: Options) -> list[str]:
    name = secret_name(options)
    notes = [
        f"the pods share a secret: kubectl -n {options.namespace} create secret generic {name}"
        " --from-literal=secret=$(openssl rand -hex 32)"
    ]
    if not deployment.deploys and not deployment.store:
        notes.append("keys made by command need `store: postgresql://...`: each pod has its own database")
    if not deployment.tenants and not deployment.gateway.allow_unauthenticated:
        notes.append("there are no tenants: pods start once there is a key, or gateway.allow_unauthenticated")
    for section, port in deployment.grpc_ports.items():
        if is_loopback(port.host):
            notes.append(f"{section}.host is {port.host}: it cannot be reached from outside the pod")
    if deployment.deploys:
        notes.append("the models run in one pod, on one node")
    return notes
