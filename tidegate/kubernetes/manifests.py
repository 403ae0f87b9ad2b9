"""The manifests of a deployment file.

With external models gateways are a Deployment that scales, with a controller beside them where the models are
scaled. Models that Tidegate starts itself run in one pod with their GPUs or cores, without Ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from policy.config.convert import require
from policy.config.deployment import Deployment, GatewayConfig
from policy.config.port_conflicts import is_loopback
from policy.deployment_file.parse import parse
from policy.types import EngineKind
from tidegate.kubernetes import controller_manifests
from tidegate.kubernetes.object_metadata import KubernetesObject, ManifestOptions, labels_of, named, object_of
from tidegate.kubernetes.rbac import access, is_scaled

STATE, CACHE = "/var/lib/tidegate", "/var/cache/tidegate"
CONFIG, SECRET = "/etc/tidegate", "/etc/tidegate-secret"
FILE = "deployment.yaml"
# The image's user.
USER = 10001
# Memory of a gateway worker beside its queue, and of the supervisor with the accounting process, in MiB.
WORKER_MIB, OTHERS_MIB = 256, 512
MIB = 1024 * 1024
# Between SIGTERM and SIGKILL beyond the drains.
SPARE_S = 15
MAX_GATEWAYS = 10
POD_NAME = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}


@dataclass(frozen=True)
class KubernetesManifests:
    """The objects, and ``notes`` on what must be there beside them."""

    objects: list[KubernetesObject]
    notes: list[str]


@dataclass(frozen=True)
class _Part:
    """Pods of one kind: their ``arguments``, whether they ``scale``, have the file, and run models.

    Controllers that elect their leader serve no gateway, and keep their state in the database.
    """

    arguments: list[str]
    role: str = ""
    scales: bool = False
    has_file: bool = True
    has_models: bool = False
    elects: bool = False


@dataclass(frozen=True)
class _Probed:
    """The port and the paths of a container's probes."""

    port: str
    tls: bool
    live: str = "/livez"
    ready: str = "/readyz"

    def probe(self, path: str, **times: int) -> dict[str, Any]:
        scheme = "HTTPS" if self.tls else "HTTP"
        return {"httpGet": {"path": path, "port": self.port, "scheme": scheme}, "timeoutSeconds": 5, **times}


def manifests(raw: dict[str, Any], deployment: Deployment, options: ManifestOptions) -> KubernetesManifests:
    """The manifests of ``deployment``, whose file's content is ``raw``.

    Raises :class:`policy.errors.ConfigError` for several controllers that cannot elect their leader, and for
    models with GPUs whose number the budget does not say.
    """
    on_gpus = any(
        spec.engine is EngineKind.VLLM and shape.gpus
        for spec in deployment.models
        for shape in spec.shapes.values()
    )
    wanted = "the number of GPUs of the pod: shapes of its models have GPUs"
    require(deployment.budget.gpus or not on_gpus, "budget.gpus", deployment.budget.gpus, wanted)
    alone = "1: no controller of its own scales external models"
    require(options.controllers == 1 or is_scaled(deployment), "--controllers", options.controllers, alone)
    if is_scaled(deployment):
        # Controllers have addresses of their own, by which gateways of other pods find them.
        raw = {
            **raw,
            "cluster": {**raw.get("cluster", {}), **controller_manifests.cluster(deployment, options)},
        }
        deployment = parse(raw)
    parts = _parts(deployment, options)
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
        objects += controller_manifests.network(deployment, options)
        if deployment.cluster.election is None:
            objects.append(_claim(options, "state", "10Gi"))
        else:
            objects.append(_disruption_budget(options, controller_manifests.ROLE))
    if deployment.deploys:
        objects += [_claim(options, "state", "10Gi"), _claim(options, "cache", "100Gi")]
    else:
        objects += [_disruption_budget(options), _autoscaler(options)]
    if options.service_monitor:
        objects.append(_service_monitor(deployment.gateway, options))
    return KubernetesManifests(objects, _notes(raw, deployment, options))


def _parts(deployment: Deployment, options: ManifestOptions) -> list[_Part]:
    run = ["run", f"{CONFIG}/{FILE}", "--watch"]
    if deployment.deploys:
        return [_Part([*run, "--no-ray"], has_models=True)]
    if not deployment.needs_controller:
        return [_Part(run, scales=True)]
    followed = controller_manifests.addresses(deployment, options)
    follow = [
        *("gateway", "--controller", followed),
        *("--secret-file", f"{SECRET}/secret", "--host", "0.0.0.0", "--admin-host", "0.0.0.0"),
    ]
    controller = _Part(run, role=controller_manifests.ROLE)
    if deployment.cluster.election is not None:
        arguments = controller_manifests.arguments(deployment, options, f"{CONFIG}/{FILE}")
        controller = _Part(arguments, role=controller_manifests.ROLE, elects=True)
    return [_Part(follow, scales=True, has_file=False), controller]


def _workload(deployment: Deployment, options: ManifestOptions, part: _Part) -> KubernetesObject:
    labels = labels_of(options, part.role)
    spec: dict[str, Any] = {
        "replicas": 1,
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
    kind = "Deployment"
    if part.scales:
        # The autoscaler sets the count: applying the manifests again must not reset it.
        del spec["replicas"]
        spec["strategy"] = {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    elif part.elects:
        kind = "StatefulSet"
        spec["replicas"] = controller_manifests.count(deployment, options)
        spec |= {"serviceName": named(options, part.role), "podManagementPolicy": "Parallel"}
    else:
        # Two pods would need the GPUs twice, and the state directory has one supervisor.
        spec["strategy"] = {"type": "Recreate"}
    if part.scales or part.elects:
        spec["template"]["spec"]["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
        ]
    return object_of("apps/v1", kind, options, name=named(options, part.role), spec=spec)


def _container(deployment: Deployment, options: ManifestOptions, part: _Part) -> dict[str, Any]:
    gateway = deployment.gateway
    ports = {"http": gateway.port, "admin": gateway.admin_port, **_grpc_ports(deployment)}
    if part.role:
        ports = ({} if part.elects else ports) | {"controller": controller_manifests.port(deployment)}
    mounts = {"state": STATE, "tmp": "/tmp"}  # noqa: S108 - a volume
    if part.has_file:
        mounts["config"] = CONFIG
    mounts["secret"] = SECRET
    if part.has_models:
        mounts |= {"cache": CACHE, "shm": "/dev/shm"}  # noqa: S108 - as above
    probed = _Probed("controller", tls=False) if part.elects else _probed(gateway)
    return {
        "name": "tidegate",
        "image": options.image,
        "args": part.arguments,
        "env": [
            {"name": "TIDEGATE_STATE_DIR", "value": STATE},
            {"name": "TIDEGATE_SECRET_FILE", "value": f"{SECRET}/secret"},
            {"name": "TIDEGATE_GATEWAY_HOST", "value": "0.0.0.0"},
            {"name": "TIDEGATE_ADMIN_HOST", "value": "0.0.0.0"},
            {"name": "XDG_CACHE_HOME", "value": CACHE},
            {"name": "TRITON_CACHE_DIR", "value": f"{CACHE}/triton"},
            *([POD_NAME] if part.elects else []),
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "startupProbe": probed.probe(probed.live, periodSeconds=2, failureThreshold=60),
        "livenessProbe": probed.probe(probed.live, periodSeconds=10, failureThreshold=3),
        "readinessProbe": probed.probe(probed.ready, periodSeconds=2, failureThreshold=3),
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


def _probed(gateway: GatewayConfig) -> _Probed:
    """The admin port, or the client port where the admin port asks for a certificate: probes have none."""
    if gateway.admin_tls is not None and gateway.admin_tls.client_ca_file is not None:
        # Another path answers while the gateway runs but cannot serve.
        return _Probed("http", tls=gateway.tls is not None, live="/docs", ready="/health")
    return _Probed("admin", tls=gateway.admin_tls is not None)


def _resources(deployment: Deployment, part: _Part) -> dict[str, Any]:
    workers, budget = 0 if part.elects else deployment.gateway.workers, deployment.budget
    memory = f"{OTHERS_MIB + WORKER_MIB * workers}Mi"
    if not part.has_models:
        limit = f"{OTHERS_MIB + (WORKER_MIB + _bounded_mib(deployment.gateway)) * workers}Mi"
        return {"requests": {"cpu": str(workers or 1), "memory": memory}, "limits": {"memory": limit}}
    # How much memory an engine takes depends on its model: a limit here would be a guess that ends pods.
    wanted: dict[str, Any] = {"requests": {"cpu": str(workers + (budget.cpus or 0)), "memory": memory}}
    if budget.gpus:
        wanted["limits"] = {"nvidia.com/gpu": str(budget.gpus)}
    return wanted


def _bounded_mib(gateway: GatewayConfig) -> int:
    """The most that a worker may hold of requests, and of answers that wait for clients.

    Under overload it refuses what is beyond: a limit below would end the pod instead.
    """
    # As the gateway does: two requests of any allowed size fit.
    transfers = max(gateway.max_upload_bytes, 2 * gateway.max_body_bytes)
    return math.ceil((gateway.max_queue_bytes + 2 * transfers) / MIB)


def _volumes(options: ManifestOptions, part: _Part) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = []
    if part.has_file:
        volumes.append({"name": "config", "configMap": {"name": options.name}})
    volumes += [
        {"name": "secret", "secret": {"secretName": secret_name(options)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if part.scales or part.elects:
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


def secret_name(options: ManifestOptions) -> str:
    """The secret with the file ``secret``, which the pods of a deployment share."""
    return f"{options.name}-secret"


def _grpc_ports(deployment: Deployment) -> dict[str, int]:
    """The gRPC ports by the part of their section that names a port in Kubernetes: `picker`, `scaler`."""
    return {name.rpartition("_")[2]: port.port for name, port in deployment.grpc_ports.items()}


def _service(options: ManifestOptions, name: str, ports: dict[str, int]) -> KubernetesObject:
    listed = [{"name": port, "port": number, "targetPort": port} for port, number in ports.items()]
    spec, labels = {"selector": labels_of(options), "ports": listed}, {"tidegate.io/port": next(iter(ports))}
    return object_of("v1", "Service", options, name=name, labels=labels, spec=spec)


def _network_policy(deployment: Deployment, options: ManifestOptions) -> KubernetesObject:
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


def _disruption_budget(options: ManifestOptions, role: str = "") -> KubernetesObject:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels_of(options, role)}}
    return object_of("policy/v1", "PodDisruptionBudget", options, name=named(options, role), spec=spec)


def _autoscaler(options: ManifestOptions) -> KubernetesObject:
    """Gateways by processor time; streams that run keep a gateway for as long as they drain."""
    target = {"type": "Utilization", "averageUtilization": 70}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": options.name},
        "minReplicas": options.gateways,
        "maxReplicas": max(options.gateways, MAX_GATEWAYS),
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return object_of("autoscaling/v2", "HorizontalPodAutoscaler", options, spec=spec)


def _claim(options: ManifestOptions, volume: str, size: str) -> KubernetesObject:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    return object_of("v1", "PersistentVolumeClaim", options, name=f"{options.name}-{volume}", spec=spec)


def _service_monitor(gateway: GatewayConfig, options: ManifestOptions) -> KubernetesObject:
    endpoint: dict[str, Any] = {
        "port": "admin",
        "path": "/metrics",
        "interval": "15s",
        # The operator names the job like the service; the alerts ask for this one.
        "relabelings": [{"targetLabel": "job", "replacement": "tidegate"}],
    }
    if gateway.admin_tls is not None:
        # Pods are scraped by their addresses, which certificates seldom have.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    spec = {
        "selector": {"matchLabels": {**labels_of(options), "tidegate.io/port": "admin"}},
        "endpoints": [endpoint],
    }
    return object_of("monitoring.coreos.com/v1", "ServiceMonitor", options, spec=spec)


def _notes(raw: dict[str, Any], deployment: Deployment, options: ManifestOptions) -> list[str]:
    name = secret_name(options)
    notes = [
        f"the pods share a secret: kubectl -n {options.namespace} create secret generic {name}"
        " --from-literal=secret=$(openssl rand -hex 32)"
    ]
    if not deployment.deploys and not deployment.store:
        notes.append("keys made by command need `store: postgresql://...`: each pod has its own database")
    if not deployment.tenants and not deployment.gateway.allow_unauthenticated:
        notes.append("there are no tenants: pods start once there is a key, or gateway.allow_unauthenticated")
    admin_tls = deployment.gateway.admin_tls
    if options.service_monitor and admin_tls is not None and admin_tls.client_ca_file is not None:
        notes.append("Prometheus needs a client certificate: add it to tlsConfig of the ServiceMonitor")
    for section, port in deployment.grpc_ports.items():
        if is_loopback(port.host):
            notes.append(f"{section}.host is {port.host}: it cannot be reached from outside the pod")
    if deployment.deploys:
        notes.append("the models run in one pod, on one node")
    if files := sorted(set(_files(raw))):
        notes.append(f"mount these files in all pods, the controller's too: {', '.join(files)}")
    return notes


def _files(raw: object, key: str = "") -> Iterator[str]:
    """The files that the content of a deployment file names, where they stand in ``raw`` under ``key``."""
    if isinstance(raw, dict):
        for name, value in raw.items():
            yield from _files(value, name)
    elif isinstance(raw, list):
        for value in raw:
            yield from _files(value, key)
    elif isinstance(raw, str):
        is_path = key in ("source", "path") and raw.startswith((".", "/", "~"))
        if raw and (is_path or key == "file" or key.endswith("_file")):
            yield raw
        elif key in ("custom", "class") and raw.startswith("/"):  # of a policy: PATH:NAME
            yield raw.rpartition(":")[0]
