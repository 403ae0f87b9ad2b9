"""What single values of the Helm chart change in its objects."""

from __future__ import annotations


import pytest

from tests.tidegate.kubernetes.test_chart import VALUES, objects
from tests.tidegate.kubernetes.validity import check, pods


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
