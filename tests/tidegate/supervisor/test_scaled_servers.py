"""Pods that Tidegate did not start, scaled from 0 by a request: processes of ours, a double of Kubernetes."""

from __future__ import annotations

import json

import pytest

from store.kubernetes.engine_pod_labels import replica_id
from tests.kubernetes_api import STATEFUL_SETS, KubernetesApi, running_elsewhere
from tests.ports import free_ports
from tests.serve.sim_documents import external_model
from tests.tidegate.conftest import Site, until

pytestmark = [pytest.mark.process, pytest.mark.long]


def test_a_request_starts_the_first_pod_and_a_stop_leaves_it(site: Site) -> None:
    api = KubernetesApi()
    api.endpoint = site.upstream.partition("://")[2]
    shapes = {"small": {"cpus": 1, "workload": "statefulset/small"}}
    modes = {"pods": {"shape": "small", "replicas": {"min": 0, "max": 3}}}
    control = {"policy": "target_tracking", "tick_s": 1, "scale": {"zero_after_s": 1}}
    with running_elsewhere(api):
        api.workload(STATEFUL_SETS, "small")
        model = external_model(api.url, shapes=shapes, modes=modes, control=control)
        (controller,) = free_ports(1)
        gateway = {"port": site.port, "admin_port": site.admin_port, "workers": 1}
        cluster = {"controller": f"127.0.0.1:{controller}"}
        document = {"models": [model], "gateway": gateway, "cluster": cluster}
        site.file.write_text(json.dumps(document))
        # Nothing of Ray is started, though that is not said.
        code, _, err = site.tidegate("up", str(site.file), "--timeout-s", "150")
        assert (code, err) == (0, "")
        assert site.status()["supervisor"]["actuator"] == "local"
        assert site.complete("m").status_code == 200
        assert site.tidegate("scale", "m", "0")[0] == 0
        until(lambda: not api.pods("small"), "no pod is left")
        assert site.tidegate("scale", "m", "auto")[0] == 0
        answer = site.complete("m")
        assert (answer.status_code, len(api.pods("small"))) == (200, 1)
        (replica,) = site.status()["fleet"]["replicas"]
        metadata = api.pods("small")[0]["metadata"]
        assert (replica["id"], replica["state"]) == (replica_id(metadata["name"], metadata["uid"]), "ready")
        assert site.tidegate("down")[0] == 0
        assert api.of(STATEFUL_SETS, "small")["spec"]["replicas"] == 1
