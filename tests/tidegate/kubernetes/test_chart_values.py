"""What single values of the Helm chart change in its objects."""

from __future__ import annotations

import pytest
import yaml

from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from tests.tidegate.kubernetes.test_chart import LLAMA, VALUES, containers, objects, of
from tests.tidegate.kubernetes.test_manifests import ELECTED, SCALED
from tests.tidegate.kubernetes.validity import check, pods
from tidegate.kubernetes.manifests import manifests
from tidegate.kubernetes.object_metadata import ManifestOptions


@pytest.mark.parametrize("name", ["vllm-pods", "stand-by", "multi-node", "multi-node stand-by"])
def test_files_of_the_deployment_are_mounted_in_all_pods(name: str) -> None:
    volume = {"name": "certificates", "secret": {"secretName": "gate-tls"}}
    mount = {"name": "certificates", "mountPath": "/tls", "readOnly": True}
    router = {"extraVolumes": [volume], "extraVolumeMounts": [mount]}
    own = VALUES[name].get("routerSpec", {})
    seen = 0
    for each in objects(VALUES[name] | {"routerSpec": own | router}):
        for pod in pods(each):
            ours = [one for one in pod["spec"]["containers"] if one["name"] != "vllm"]
            assert [one for one in ours if mount not in one["volumeMounts"]] == []
            assert volume in pod["spec"]["volumes"] or not ours
            seen += len(ours)
        if each["kind"] in ("Deployment", "StatefulSet", "RayCluster"):
            check(each)
    assert seen > 1


@pytest.mark.parametrize(
    ("tag", "cpu", "gpu"),
    [
        ("", "0.1.0-cpu", "0.1.0-gpu"),
        ("0.1.1", "0.1.1-cpu", "0.1.1-gpu"),
        ("0.2.0rc1", "0.2.0rc1-cpu", "0.2.0rc1-gpu"),
        ("0.1.1-gpu", "0.1.1-gpu", "0.1.1-gpu"),
        ("main", "main", "main"),
    ],
)
def test_a_version_has_an_image_for_pods_with_gpus_and_one_for_others(tag: str, cpu: str, gpu: str) -> None:
    for name in ("gpu", "multi-node"):
        own = VALUES[name]["routerSpec"]
        for container in containers(objects(VALUES[name] | {"routerSpec": own | {"tag": tag}})):
            has_gpus = "nvidia.com/gpu" in container["resources"].get("limits", {})
            assert container["image"] == f"tidegate:{gpu if has_gpus else cpu}"


def test_pods_of_a_ray_cluster_are_recreated_by_an_upgrade() -> None:
    (cluster,) = of(objects(VALUES["multi-node"]), "RayCluster")
    check(cluster)
    assert cluster["spec"]["upgradeStrategy"] == {"type": "Recreate"}


def test_zeros_are_kept() -> None:
    (model, *_) = VALUES["vllm-pods"]["servingEngineSpec"]["modelSpec"]
    for given, replicas, grace in (({}, 1, 630), ({"replicaCount": 0, "drainSeconds": 0}, 0, 30)):
        plain = {key: value for key, value in model.items() if key != "replicaCount"}
        pod = of(objects({"servingEngineSpec": {"modelSpec": [plain | given]}}), "Deployment")
        (vllm,) = [each["spec"] for each in pod if each["metadata"]["name"].endswith("vllm-llama")]
        assert vllm["replicas"] == replicas
        assert vllm["template"]["spec"]["terminationGracePeriodSeconds"] == grace
    values = VALUES["multi-node"]
    (group,) = values["rayClusterSpec"]["workerGroups"]
    for given, bounds in (({"minReplicas": 0}, (0, 4)), ({"minReplicas": None, "maxReplicas": None}, (2, 2))):
        ray = values["rayClusterSpec"] | {"workerGroups": [group | given]}
        (cluster,) = of(objects(values | {"rayClusterSpec": ray}), "RayCluster")
        (workers,) = cluster["spec"]["workerGroupSpecs"]
        assert (workers["minReplicas"], workers["maxReplicas"]) == bounds


def test_a_pod_with_gpus_needs_their_number() -> None:
    document = yaml.safe_load(LLAMA["deployment"])
    del document["budget"]
    values = {"deployment": yaml.safe_dump(document)}
    with pytest.raises(Exception, match=r"budget\.gpus: expected the number of GPUs"):
        objects(VALUES["gpu"] | values)
    with pytest.raises(ConfigError, match="the number of GPUs"):
        manifests(document, parse(document), ManifestOptions("g", "n", "i"))
    # On a Ray cluster its groups of workers say it.
    assert objects(VALUES["multi-node"] | values)


@pytest.mark.parametrize(
    ("gateway", "limit"),
    [
        ({}, 512 + 2 * (256 + 256 + 2 * 64)),
        ({"workers": 4, "max_queue_bytes": 2**30 + 1}, 512 + 4 * (256 + 1025 + 2 * 64)),
        ({"max_upload_bytes": 2**27}, 512 + 2 * (256 + 256 + 2 * 128)),
        ({"max_body_bytes": 2**27}, 512 + 2 * (256 + 256 + 2 * 256)),
    ],
)
def test_the_memory_limit_of_a_gateway_has_room_for_its_bounds(gateway: dict[str, int], limit: int) -> None:
    document = SCALED | {"gateway": gateway}
    written = manifests(document, parse(document), ManifestOptions("g", "n", "i")).objects
    for found in (objects({"deployment": yaml.safe_dump(document)}), written):
        limits = [one["resources"]["limits"]["memory"] for one in containers(of(found, "Deployment"))]
        assert limits == 2 * [f"{limit}Mi"]
    (elected,) = of(objects({"deployment": yaml.safe_dump(ELECTED)}), "StatefulSet")
    assert [one["resources"]["limits"] for one in containers([elected])] == [{"memory": "512Mi"}]
