"""The manifests of the shipped documents are valid for Kubernetes, and name what exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from tests.tidegate.kubernetes.validity import check, check_container
from tidegate.cli import group
from tidegate.kubernetes.manifests import CONFIG, FILE, grace_s, manifests
from tidegate.kubernetes.object_metadata import ManifestOptions, as_yaml

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted(path.name for path in (ROOT / "deployments").glob("*.yaml"))
DISCOVERED = {
    "models": [
        {
            "name": "m",
            "engine": "external",
            "discovery": {"kubernetes": {"service": "s", "namespace": "models"}},
        }
    ],
    "gateway": {"drain_delay_s": 5, "drain_timeout_s": 60},
    "endpoint_picker": {"port": 9100},
    "tenants": [{"name": "web", "keys_sha256": ["0" * 64]}],
    "store": "postgresql://db/tidegate",
}
# Pods that a controller scales, in two namespaces.
SCALED = DISCOVERED | {
    "models": [
        DISCOVERED["models"][0]
        | {
            "name": name,
            "discovery": {"kubernetes": {"service": name, "namespace": namespace}},
            "shapes": {kind: {"cpus": 1, "workload": f"{kind}/{name}"} for kind in kinds},
            "modes": {kind: {"shape": kind, "replicas": 2} for kind in kinds},
        }
        for name, namespace, kinds in (
            ("a", "", ("deployment", "leaderworkerset")),
            ("b", "", ("statefulset",)),
            ("c", "other", ("deployment",)),
        )
    ],
    "cluster": {"controller": "127.0.0.1:7171"},
    "external_scaler": {},
    "budget": {"cpus": 20},
}
# The same by controllers that elect their leader.
ELECTED = SCALED | {"cluster": {"controller": "a:7171,b:7171", "leader_election": {"lease_s": 5}}}
# Pods of two sizes that somebody else scales: their labels are read.
LABELLED = DISCOVERED | {
    "models": [
        DISCOVERED["models"][0]
        | {"shapes": {"a": {"cpus": 1}, "b": {"cpus": 2}}, "modes": {"one": {"shape": "a"}}}
    ]
}
# TLS of the admin port, and of both with certificates of clients.
PAIR = {"cert_file": "/tls/tls.crt", "key_file": "/tls/tls.key"}
SECURE = DISCOVERED | {"gateway": {"admin_tls": PAIR}}
MUTUAL = SCALED | {"gateway": {"tls": PAIR, "admin_tls": PAIR | {"client_ca_file": "/tls/ca.crt"}}}
DOCUMENTS = {
    "discovered": DISCOVERED, "scaled": SCALED, "elected": ELECTED, "labelled": LABELLED, "secure": SECURE,
    "mutual": MUTUAL,
}  # fmt: skip


def written(name: str) -> dict[str, Any]:
    """The content of a shipped file, or of one of the :data:`DOCUMENTS`."""
    raw: dict[str, Any] = DOCUMENTS.get(name) or yaml.safe_load((ROOT / "deployments" / name).read_text())
    return raw


def rendered(raw: dict[str, Any], **more: Any) -> dict[str, list[dict[str, Any]]]:
    options = ManifestOptions("gate", "serving", **{"image": "tidegate:1"} | more)
    found = manifests(raw, parse(raw), options)
    objects: dict[str, list[dict[str, Any]]] = {}
    for each in yaml.safe_load_all(as_yaml(found.objects)):
        objects.setdefault(each["kind"], []).append(each)
    return objects


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-8gpu.yaml", *DOCUMENTS])
def test_objects_are_valid(name: str) -> None:
    for objects in rendered(written(name), service_monitor=True).values():
        for each in objects:
            check(each)


def probes(found: dict[str, list[dict[str, Any]]]) -> dict[str, set[tuple[str, str, str]]]:
    """Path, port and scheme of each kind of probe."""
    containers = [each["spec"]["template"]["spec"]["containers"][0] for each in found["Deployment"]]
    return {
        probe: {tuple(one[probe]["httpGet"][key] for key in ("path", "port", "scheme")) for one in containers}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }


@pytest.mark.parametrize(
    ("document", "live", "ready"),
    [
        (DISCOVERED, ("/livez", "admin", "HTTP"), ("/readyz", "admin", "HTTP")),
        (SECURE, ("/livez", "admin", "HTTPS"), ("/readyz", "admin", "HTTPS")),
        (MUTUAL, ("/docs", "http", "HTTPS"), ("/health", "http", "HTTPS")),
        (MUTUAL | {"gateway": {"admin_tls": MUTUAL["gateway"]["admin_tls"]}},  # type: ignore[index]
         ("/docs", "http", "HTTP"), ("/health", "http", "HTTP")),
    ],
)  # fmt: skip
def test_probes_and_prometheus_speak_what_the_ports_do(
    document: dict[str, Any], live: tuple[str, ...], ready: tuple[str, ...]
) -> None:
    found = rendered(document, service_monitor=True)
    # Without a certificate of their own probes ask the client port.
    assert probes(found) == {"startupProbe": {live}, "livenessProbe": {live}, "readinessProbe": {ready}}
    ((endpoint,),) = (each["spec"]["endpoints"] for each in found["ServiceMonitor"])
    tls = document["gateway"].get("admin_tls")
    assert endpoint.get("scheme") == ("https" if tls else None)
    assert endpoint.get("tlsConfig") == ({"insecureSkipVerify": True} if tls else None)
    notes = manifests(document, parse(document), ManifestOptions("g", "n", "i", service_monitor=True)).notes
    assert ("tlsConfig" in str(notes)) is ("client_ca_file" in (tls or {}))


def test_gateways_of_external_models_scale_and_may_follow_their_pods() -> None:
    found = rendered(DISCOVERED, gateways=3, service_monitor=True)
    (deployment,) = found["Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # The autoscaler sets the count: applied again, the manifests leave it.
    assert "replicas" not in deployment["spec"]
    assert found["HorizontalPodAutoscaler"][0]["spec"]["minReplicas"] == 3
    assert pod["terminationGracePeriodSeconds"] > 65
    assert {each["name"]: each["containerPort"] for each in container["ports"]} == {
        "http": 8080, "admin": 8081, "picker": 9100
    }  # fmt: skip
    (role,) = found["Role"]
    # Its model declares nothing that labels of pods could say.
    assert (role["metadata"]["namespace"], [each["resources"] for each in role["rules"]]) == (
        "models",
        [["endpointslices"]],
    )
    assert found["ServiceAccount"][0]["automountServiceAccountToken"] is True
    assert {"PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor"} <= found.keys()
    assert "PersistentVolumeClaim" not in found


def test_models_of_tidegate_have_their_gpus_in_one_pod() -> None:
    raw = yaml.safe_load((ROOT / "deployments" / "llama-8gpu.yaml").read_text())
    found = rendered(raw)
    (deployment,) = found["Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert len(found["PersistentVolumeClaim"]) == 2
    # What Hugging Face's hub, vLLM and Triton write there goes to the volume too: the rest is read-only.
    values = {each["name"]: each.get("value") for each in container["env"]}
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    assert values["XDG_CACHE_HOME"] in mounted
    assert values["TRITON_CACHE_DIR"].startswith(values["XDG_CACHE_HOME"])
    assert found["ServiceAccount"][0]["automountServiceAccountToken"] is False
    assert grace_s(parse(raw)) > 150


def test_a_controller_scales_pods_and_gateways_follow_it() -> None:
    found = rendered(SCALED)
    gateways, controller = (each["spec"] for each in found["Deployment"])
    assert ("replicas" in gateways, controller["replicas"]) == (False, 1)
    (container,) = controller["template"]["spec"]["containers"]
    assert {"name": "controller", "containerPort": 7171} in container["ports"]
    (config,) = found["ConfigMap"]
    assert yaml.safe_load(config["data"][FILE])["cluster"] == {"controller": "0.0.0.0:7171"}
    check_container(container)
    (follower,) = gateways["template"]["spec"]["containers"]
    check_container(follower)
    assert "gate-controller:7171" in follower["args"]
    rights = {
        (each["metadata"]["name"], each["metadata"]["namespace"]): [
            rule["resources"][0] for rule in each["rules"]
        ]
        for each in found["Role"]
    }
    assert rights["gate", "other"] == rights["gate", "serving"] == ["endpointslices", "services", "pods"]
    assert rights["gate-controller", "other"] == [
        "endpointslices",
        "services",
        "pods",
        "deployments",
        "deployments/scale",
        "pods",
    ]
    assert "leaderworkersets/scale" in rights["gate-controller", "serving"]


@pytest.mark.parametrize(("raw", "controllers"), [(SCALED, 3), (ELECTED, 1)])
def test_controllers_that_elect_their_leader_are_known_to_gateways_by_name(
    raw: dict[str, Any], controllers: int
) -> None:
    found = rendered(raw, controllers=controllers)
    (gateways,), (elected,) = found["Deployment"], found["StatefulSet"]
    spec = elected["spec"]
    count = max(controllers, 2)
    assert (spec["replicas"], spec["serviceName"]) == (count, "gate-controller")
    addresses = [f"gate-controller-{each}.gate-controller:7171" for each in range(count)]
    (follower,), (container,) = (
        each["spec"]["template"]["spec"]["containers"] for each in (gateways, elected)
    )
    assert follower["args"][2] == ",".join(addresses)
    check_container(container)
    own = container["args"][container["args"].index("--address") + 1]
    assert [own.replace("$(POD_NAME)", f"gate-controller-{each}") for each in range(count)] == addresses
    (config,) = found["ConfigMap"]
    cluster = parse(yaml.safe_load(config["data"][FILE])).cluster
    assert list(cluster.controllers) == addresses
    assert cluster.election is not None
    assert cluster.election.kubernetes is not None
    assert cluster.election.kubernetes.name == "gate-controller"
    assert cluster.election.lease_s == (5 if controllers == 1 else 10)
    rights = {
        (role["metadata"]["name"], role["metadata"]["namespace"]): role["rules"] for role in found["Role"]
    }
    lease = {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "create", "update"],
    }
    assert [key for key, rules in rights.items() if lease in rules] == [("gate-controller", "serving")]
    assert "PersistentVolumeClaim" not in found


@pytest.mark.parametrize(
    ("raw", "controllers", "path"),
    [(SCALED | {"store": "sqlite:///t.db"}, 2, "store"), (DISCOVERED, 2, "--controllers")],
)
def test_several_controllers_take_a_database_and_models_that_are_scaled(
    raw: dict[str, Any], controllers: int, path: str
) -> None:
    with pytest.raises(ConfigError, match=path):
        rendered(raw, controllers=controllers)


@pytest.mark.parametrize("raw", [DISCOVERED, yaml.safe_load((ROOT / "deployments" / "sim.yaml").read_text())])
def test_commands_files_and_probes_exist(raw: dict[str, Any]) -> None:
    found = rendered(raw)
    (container,) = found["Deployment"][0]["spec"]["template"]["spec"]["containers"]
    assert container["args"][1] == f"{CONFIG}/{FILE}"
    (config,) = found["ConfigMap"]
    assert yaml.safe_load(config["data"][FILE]) == raw
    check_container(container)
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in found["Deployment"][0]["spec"]["template"]["spec"]["volumes"]}


def test_the_command_prints_manifests_and_notes(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(yaml.safe_dump({"models": [{"name": "m", "engine": "external", "urls": ["http://h:1"]}]}))
    result = CliRunner().invoke(group, ["render", "kubernetes", str(file), "--name", "gate"])
    assert result.exit_code == 0
    assert {each["metadata"]["name"] for each in yaml.safe_load_all(result.stdout)} == {"gate", "gate-admin"}
    assert "kubectl -n default create secret generic gate-secret" in result.stderr
    assert "postgresql" in result.stderr
    assert "no tenants" in result.stderr
    assert CliRunner().invoke(group, ["render", "kubernetes", str(file), "--name", "Bad_"]).exit_code != 0


def test_files_that_pods_need_are_noted() -> None:
    (model,) = DISCOVERED["models"]
    custom = {**DISCOVERED, "models": [model | {"control": {"policy": {"custom": "/own/policy.py:Steady"}}}]}
    for document, files in (
        (DISCOVERED, ""),
        (custom, "/own/policy.py"),
        (MUTUAL, "/tls/ca.crt, /tls/tls.crt, /tls/tls.key"),
    ):
        notes = manifests(document, parse(document), ManifestOptions("g", "n", "i")).notes
        assert [each.partition(": ")[2] for each in notes if each.startswith("mount")] == [files][
            : bool(files)
        ]
