"""The Helm chart, by Helm's own library: valid for Kubernetes, and equal to what `tidegate render` writes."""

from __future__ import annotations

import http.server
import runpy
import sys
import threading
import time
from typing import Any

import pytest
import yaml

from policy.deployment_file.parse import parse
from serve.actuator.serve_application_status import SERVE_ENVIRONMENT
from tests.tidegate.kubernetes.test_manifests import DOCUMENTS, ROOT, SHIPPED, rendered, written
from tests.tidegate.kubernetes.validity import check, check_container, pods
from tidegate.importers.vllm_flags import read_flags

helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk")

CHART = ROOT / "deployments" / "kubernetes" / "chart"
LLAMA = {"deployment": (ROOT / "deployments" / "llama-8gpu.yaml").read_text()}
# Helm's own labels.
OWN = {"app.kubernetes.io/managed-by", "helm.sh/chart"}


def example(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def several(name: str, deployment: str) -> dict[str, Any]:
    """The values of an example with two controllers."""
    document = yaml.safe_load(deployment) | {"store": "postgresql://db/tidegate"}
    return example(name) | {"deployment": yaml.safe_dump(document), "controller": {"replicas": 2}}


VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "cpu": {"deployment": (ROOT / "deployments" / "smollm2-cpu-modes.yaml").read_text()},
    "gpu": example("gpu") | LLAMA,
    "multi-node": example("multi-node") | LLAMA,
    "vllm-pods": example("vllm-pods"),
    "stand-by": several("vllm-pods", example("vllm-pods")["deployment"]),
    "multi-node stand-by": several("multi-node", LLAMA["deployment"]),
}


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a release `gate` in the namespace `serving`."""
    files = helm.Chart.load(CHART).render(values=values, name="gate", namespace="serving")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] == kind]


def containers(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for each in found for pod in pods(each) for one in pod["spec"]["containers"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_the_chart_is_valid_with_each_example(name: str) -> None:
    values = VALUES[name]
    report = helm.lint(CHART, values, strict=True, kube_version="v1.32.0")
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    found = objects(values)
    for each in found:
        check(each)
    names = [(each["kind"], each["metadata"]["namespace"], each["metadata"]["name"]) for each in found]
    assert len(names) == len(set(names))
    (config,) = of(found, "ConfigMap")
    parse(yaml.safe_load(config["data"]["deployment.yaml"]))


@pytest.mark.parametrize("name", VALUES)
def test_commands_probes_and_volumes_exist(name: str) -> None:
    found = objects(VALUES[name])
    ours = [each for each in containers(found) if each["name"] == "tidegate"]
    assert ours
    for container in ours:
        check_container(container)
    for each in found:
        for pod in pods(each):
            volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
            used = {mount["name"] for one in pod["spec"]["containers"] for mount in one["volumeMounts"]}
            assert used == set(volumes)
            assert len(volumes) == len(used)
    claims = {each["metadata"]["name"] for each in of(found, "PersistentVolumeClaim")}
    assert f"'claimName': '{sorted(claims)[0]}'" in str(found) if claims else "claimName" not in str(found)


@pytest.mark.parametrize("name", [*SHIPPED, *DOCUMENTS])
def test_the_chart_and_the_command_agree(name: str) -> None:
    raw = written(name)
    kind = "gpu" if "gpus" in raw.get("budget", {}) else "cpu"
    several = 2 if name == "elected" else 1
    expected = rendered(raw, service_monitor=True, controllers=several, image=f"tidegate:0.1.0-{kind}")
    values = {
        "deployment": yaml.safe_dump(raw),
        "controller": {"replicas": several},
        "secret": {"create": False},
        "routerSpec": {"serviceMonitor": {"enabled": True}},
    }
    found = objects(values)
    for each in found:
        each["metadata"]["labels"] = {k: v for k, v in each["metadata"]["labels"].items() if k not in OWN}
    for each in (*found, *(one for some in expected.values() for one in some)):
        if each["kind"] == "ConfigMap":
            each["data"] = {file: yaml.safe_load(text) for file, text in each["data"].items()}
        for one in containers([each]):
            one["volumeMounts"].sort(key=str)
    assert {kind: sorted(of(found, kind), key=str) for kind in {each["kind"] for each in found}} == {
        kind: sorted(some, key=str) for kind, some in expected.items()
    }


def test_prometheus_of_another_namespace_may_read_the_admin_port() -> None:
    values = {"routerSpec": {"networkPolicy": {"enabled": True, "adminNamespaces": ["monitoring"]}}}
    (policy,) = of(objects(values), "NetworkPolicy")
    check(policy)
    rules = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]}
    other = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert rules == {"http": None, "admin": [{"podSelector": {}}, other]}


def test_prometheus_may_verify_the_admin_port_and_show_a_certificate() -> None:
    own = {"ca": {"secret": {"name": "ca", "key": "ca.crt"}}, "serverName": "gate"}
    values = {
        "deployment": yaml.safe_dump(written("mutual")),
        "routerSpec": {"serviceMonitor": {"enabled": True, "tlsConfig": own}},
    }
    (monitor,) = of(objects(values), "ServiceMonitor")
    check(monitor)
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", own)


def test_the_supervisor_of_a_ray_cluster_is_probed_without_a_certificate() -> None:
    pair = {"cert_file": "/tls/tls.crt", "key_file": "/tls/tls.key", "client_ca_file": "/tls/ca.crt"}
    document = yaml.safe_load(LLAMA["deployment"]) | {"gateway": {"admin_tls": pair}}
    (cluster,) = of(objects(example("multi-node") | {"deployment": yaml.safe_dump(document)}), "RayCluster")
    _, supervisor = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    asked = {"path": "/docs", "port": "http", "scheme": "HTTP"}
    assert supervisor["startupProbe"]["httpGet"] == supervisor["livenessProbe"]["httpGet"] == asked


def test_an_autoscaler_sets_the_count_of_gateways_alone() -> None:
    values = example("vllm-pods")
    for autoscaled in (True, False):
        found = objects(values | {"routerSpec": {"autoscaling": {"enabled": autoscaled}}})
        (gateway,) = [each for each in of(found, "Deployment") if each["metadata"]["name"] == "gate"]
        assert ("replicas" in gateway["spec"]) is not autoscaled
        scalers = [each["spec"]["scaleTargetRef"]["name"] for each in of(found, "HorizontalPodAutoscaler")]
        assert ("gate" in scalers) is autoscaled


def test_a_ray_cluster_has_a_controller_that_gateways_follow() -> None:
    found = objects(VALUES["multi-node"])
    (cluster,), (gateway,) = of(found, "RayCluster"), of(found, "Deployment")
    head, supervisor = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in head["env"]}
    assert SERVE_ENVIRONMENT.items() <= environment.items()
    assert environment["RAY_AUTH_MODE"] == "token"
    # They share the sockets of the head.
    assert head["volumeMounts"] == supervisor["volumeMounts"]
    (config,) = of(found, "ConfigMap")
    document = parse(yaml.safe_load(config["data"]["deployment.yaml"]))
    assert document.cluster.address == "127.0.0.1:6379"
    assert document.cluster.controller in gateway["spec"]["template"]["spec"]["containers"][0]["args"]
    (service,) = [each for each in of(found, "Service") if each["metadata"]["name"] == "gate-controller"]
    assert service["spec"]["selector"] == {"ray.io/cluster": "gate", "ray.io/node-type": "head"}
    requirements = (ROOT / "requirements" / "gpu.txt").read_text()
    assert f"\nray=={cluster['spec']['rayVersion']}\n" in requirements


def test_the_autoscaler_of_kuberay_reaches_kubernetes_and_the_ray_cluster() -> None:
    found = objects(VALUES["multi-node"])
    (cluster,) = of(found, "RayCluster")
    spec = cluster["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    pod = spec["headGroupSpec"]["template"]["spec"]
    # Its container has the token of the pod, and needs that of Ray.
    assert pod["automountServiceAccountToken"] is True
    head, supervisor = pod["containers"]
    ray = [each for each in head["env"] if each["name"].startswith("RAY_AUTH_")]
    assert spec["autoscalerOptions"]["env"] == ray
    assert spec["autoscalerOptions"]["securityContext"] == head["securityContext"]
    # KubeRay mounts this volume in the head and the autoscaler; the supervisor joins by sockets in it.
    for each in (head, supervisor):
        assert {"name": "ray-logs", "mountPath": "/tmp/ray"} in each["volumeMounts"]
    accounts = {each["metadata"]["name"]: each for each in of(found, "ServiceAccount")}
    assert pod["serviceAccountName"] == "gate-ray"
    assert set(accounts) == {"gate", "gate-ray"}


@pytest.mark.parametrize("controllers", [1, 2])
def test_no_role_of_the_chart_has_the_name_of_the_autoscalers(controllers: int) -> None:
    values = VALUES["multi-node" if controllers == 1 else "multi-node stand-by"]
    document = yaml.safe_load(values["deployment"])
    discovery = {"kubernetes": {"service": "other", "port": "http"}}
    document["models"].append({"name": "other", "engine": "external", "discovery": discovery})
    found = objects(values | {"deployment": yaml.safe_dump(document)})
    (cluster,) = of(found, "RayCluster")
    roles = {each["metadata"]["name"]: each for each in of(found, "Role")}
    # KubeRay leaves a Role of this name as it is, without the rights of its autoscaler.
    assert cluster["metadata"]["name"] not in roles
    bound = {
        each["subjects"][0]["name"]: each["roleRef"]["name"]
        for each in of(found, "RoleBinding")
        if each["metadata"]["name"] == each["roleRef"]["name"]
    }
    owner = "gate-ray" if controllers == 1 else "gate-controller"
    assert bound == {"gate": "gate-gateway", owner: owner}
    rights = {name: {kind for rule in roles[name]["rules"] for kind in rule["resources"]} for name in roles}
    assert all("endpointslices" in kinds for kinds in rights.values())


@pytest.mark.slow
def test_several_controllers_of_a_ray_cluster_are_nodes_of_it() -> None:
    from ray.scripts.scripts import start as ray_start  # noqa: PLC0415

    found = objects(VALUES["multi-node stand-by"])
    (cluster,), (controllers,) = of(found, "RayCluster"), of(found, "StatefulSet")
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert "controller" not in {port["name"] for port in head["ports"]}
    assert cluster["spec"]["gcsFaultToleranceOptions"] == {"redisAddress": "redis:6379"}
    pod = controllers["spec"]["template"]["spec"]
    controller, node = pod["containers"]
    # They share the sockets of the node.
    assert node["volumeMounts"] == controller["volumeMounts"]
    with ray_start.make_context("ray start", node["command"][2:]) as context:
        joined = context.params
    assert (joined["num_cpus"], joined["num_gpus"], joined["block"]) == (0, 0, True)
    (config,) = of(found, "ConfigMap")
    document = parse(yaml.safe_load(config["data"]["deployment.yaml"]))
    assert document.cluster.address == joined["address"] == "gate-ray-head:6379"
    services = {each["metadata"]["name"]: each["spec"]["selector"] for each in of(found, "Service")}
    assert services["gate-ray-head"] == {"ray.io/cluster": "gate", "ray.io/node-type": "head"}
    assert services["gate-controller"] == controllers["spec"]["selector"]["matchLabels"]
    (gateway,) = of(found, "Deployment")
    assert document.cluster.controller in gateway["spec"]["template"]["spec"]["containers"][0]["args"]
    (budget,) = [
        each for each in of(found, "PodDisruptionBudget") if "controller" in each["metadata"]["name"]
    ]
    assert budget["spec"]["selector"] == controllers["spec"]["selector"]


def test_vllm_pods_are_discovered_and_drain_before_they_end() -> None:
    found = objects(VALUES["vllm-pods"])
    (config,) = of(found, "ConfigMap")
    document = parse(yaml.safe_load(config["data"]["deployment.yaml"]))
    model = document.models[0]
    assert model.discovery is not None
    assert model.discovery.kubernetes is not None
    (service,) = [each for each in of(found, "Service") if each["metadata"]["name"].endswith("vllm-llama")]
    assert model.discovery.kubernetes.service == service["metadata"]["name"]
    (pod,) = [
        pod for each in of(found, "Deployment") for pod in pods(each) if "llama" in str(pod["metadata"])
    ]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > 600
    (vllm,) = pod["spec"]["containers"]
    flags = read_flags(vllm["args"])
    assert (flags["served_model_name"], flags["max_model_len"], flags["port"]) == (["llama"], 8192, 8000)
    assert vllm["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    # Weights may take an hour.
    assert vllm["startupProbe"]["periodSeconds"] * vllm["startupProbe"]["failureThreshold"] == 3600
    *_, script, port, _ = vllm["lifecycle"]["preStop"]["exec"]["command"]
    assert (port, script.strip()) == ("8000", (CHART / "files" / "drain_vllm.py").read_text().strip())


def test_vllm_pods_are_scaled_by_tidegate_or_by_keda() -> None:
    found = objects(VALUES["vllm-pods"])
    (config,) = of(found, "ConfigMap")
    document = parse(yaml.safe_load(config["data"]["deployment.yaml"]))
    workloads = {f"deployment/{each['metadata']['name']}": each["spec"] for each in of(found, "Deployment")}
    scaled = {spec.name: spec for spec in document.models if spec.is_scaled}
    assert set(scaled) == {"Qwen/Qwen3-32B", "BAAI/bge-m3"}
    for spec in scaled.values():
        (shape,) = spec.shapes.values()
        assert "replicas" not in workloads[shape.workload]
    assert scaled["Qwen/Qwen3-32B"].modes["pods"].bounds.max == 4
    embedding = scaled["BAAI/bge-m3"].discovery
    assert embedding is not None
    assert embedding.is_autoscaled
    assert scaled["BAAI/bge-m3"].control.scale.zero_after_s == 600
    (keda,) = of(found, "ScaledObject")
    (trigger,) = keda["spec"]["triggers"]
    assert trigger["metadata"]["model"] == "BAAI/bge-m3"
    assert [trigger["metadata"]["shape"]] == list(scaled["BAAI/bge-m3"].shapes)
    host, _, port = trigger["metadata"]["scalerAddress"].partition(":")
    (service,) = [each for each in of(found, "Service") if each["metadata"]["name"] == host.split(".")[0]]
    assert {"name": "scaler", "port": int(port), "targetPort": "scaler"} in service["spec"]["ports"]
    assert document.external_scaler is not None
    assert (document.external_scaler.host, document.external_scaler.port) == ("0.0.0.0", int(port))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"deployment": "- [", "secret": {}}, "expected YAML"),
        ({"rayClusterSpec": {"enabled": True, "workerGroups": []}} | LLAMA, "at least one group"),
        ({"rayClusterSpec": {"enabled": True}} | example("vllm-pods"), "that Tidegate starts"),
        (example("vllm-pods") | {"controller": {"replicas": 2}}, "store: expected postgresql"),
        ({"controller": {"replicas": 2}}, "controller.replicas: expected 1"),
        (VALUES["multi-node stand-by"] | {"rayClusterSpec": {"enabled": True}}, "expected a Redis"),
    ],
)
def test_values_without_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=message):
        objects(values)


@pytest.mark.slow
def test_the_hook_waits_for_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([(2, 1), (1, 0), (0, 0)])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            running, waiting = next(counts)
            lines = f'vllm:num_requests_running{{e="0"}} {running}.0\nvllm:num_requests_waiting {waiting}.0\n'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(lines.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            return

    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(sys, "argv", ["drain", str(server.server_port), "5"])
        runpy.run_path(str(CHART / "files" / "drain_vllm.py"), run_name="__main__")
        server.shutdown()
        thread.join()
    assert slept == [5, 1, 1]
    # No server answers any more.
    runpy.run_path(str(CHART / "files" / "drain_vllm.py"), run_name="__main__")
