"""The pods of two controllers as processes: commands, probes, a changed ConfigMap, the leader's end."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import httpx
import psutil
import pytest
import yaml

from serve.controller.client import ControllerClient
from tests.kubernetes_api import STATEFUL_SETS, KubernetesApi, running_elsewhere
from tests.ports import free_ports
from tests.serve.sim_documents import external_model
from tests.tidegate.conftest import Command, Site, site, until, upstream
from tests.tidegate.kubernetes.test_manifests import rendered
from tidegate.kubernetes.manifests import CONFIG, SECRET

__all__ = ["site", "upstream"]
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.1")
pytestmark = [pytest.mark.process, pytest.mark.long]


def document(api: KubernetesApi, gateway: dict[str, int], maximum: int) -> dict[str, Any]:
    shapes = {"small": {"cpus": 1, "workload": "statefulset/small"}}
    modes = {"pods": {"shape": "small", "replicas": {"min": 1, "max": maximum}}}
    model = external_model(api.url, shapes=shapes, modes=modes, control={"policy": "target_tracking"})
    return {
        "models": [model], "store": "postgresql://db/tidegate",
        "gateway": gateway | {"workers": 1, "drain_timeout_s": 2},
        "cluster": {"leader_election": {"lease_s": 3}},
    }  # fmt: skip


class Pods:
    """The pods of the manifests, each with an address of loopback in place of its name."""

    def __init__(self, site: Site, raw: dict[str, Any]) -> None:
        self.sites = [replace(site, folder=site.folder / str(number)) for number in range(3)]
        self.port = free_ports(1)[0]
        self.addresses = [f"{host}:{self.port}" for host in HOSTS[:2]]
        self.store = f"sqlite:///{site.folder}/t.db"
        self.found: dict[str, list[dict[str, Any]]] = {}
        for each in self.sites:
            each.folder.mkdir()
            (each.folder / "secret").write_text("s" * 64)
        self.write(raw)

    def write(self, raw: dict[str, Any]) -> None:
        """The ConfigMap of all pods; the lease is in the database, as there is no API server with leases."""
        cluster = raw["cluster"] | {"controller": f"c:{self.port}"}
        self.found = rendered(raw | {"cluster": cluster}, controllers=2)
        content = yaml.safe_load(self.found["ConfigMap"][0]["data"]["deployment.yaml"]) | {
            "store": self.store
        }
        content["cluster"] = {"controller": ",".join(self.addresses), "leader_election": {"lease_s": 3}}
        for each in self.sites:
            (each.folder / "deployment.yaml").write_text(yaml.safe_dump(content))

    def container(self, number: int) -> dict[str, Any]:
        """The container of controller 0 or 1, or of the gateway."""
        workload = self.found["StatefulSet" if number < 2 else "Deployment"][0]
        found: dict[str, Any] = workload["spec"]["template"]["spec"]["containers"][0]
        return found

    def start(self, number: int) -> Command:
        """The command of the container."""
        folder, host = str(self.sites[number].folder), HOSTS[number]
        known = {
            f"$(POD_NAME).gate-controller:{self.port}": f"{host}:{self.port}",
            self.container(2)["args"][2]: ",".join(self.addresses),
            "0.0.0.0": host,
        }
        words = [known.get(word, word) for word in self.container(number)["args"]]
        return self.sites[number].popen(*(w.replace(SECRET, folder).replace(CONFIG, folder) for w in words))

    def probe(self, number: int, name: str) -> int:
        """The status that a probe of the pod has, 0 without an answer."""
        container = self.container(number)
        asked = container[name]["httpGet"]
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == asked["port"]]
        try:
            return httpx.get(f"http://{HOSTS[number]}:{port}{asked['path']}", trust_env=False).status_code
        except httpx.HTTPError:
            return 0


def test_pods_start_follow_the_config_map_and_survive_the_leader(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = KubernetesApi()
    api.endpoint = site.upstream.partition("://")[2]
    with running_elsewhere(api):
        api.workload(STATEFUL_SETS, "small")
        ports = {"port": site.port, "admin_port": site.admin_port}
        pods = Pods(site, document(api, ports, 2))
        monkeypatch.setenv("TIDEGATE_SECRET_FILE", str(pods.sites[0].folder / "secret"))
        with pods.start(0) as first, pods.start(1) as second, pods.start(2) as gateway:
            client = ControllerClient(",".join(pods.addresses), "s" * 64)
            for number in range(3):
                until(lambda number=number: pods.probe(number, "livenessProbe") == 200, "it lives")
                until(lambda number=number: pods.probe(number, "readinessProbe") == 200, "it is ready")
            until(lambda: site.complete("m").status_code == 200, "a pod of the model serves")
            pods.write(document(api, ports, 3))
            until(lambda: client.document()["models"][0]["modes"]["pods"]["replicas"]["max"] == 3, "applied")
            (leader,) = [at for at, known in client.leaders().items() if known is not None and known.leads]
            killed, left = (first, second) if leader == pods.addresses[0] else (second, first)
            for process in [*psutil.Process(killed.pid).children(recursive=True), psutil.Process(killed.pid)]:
                process.send_signal(signal.SIGKILL)
            assert site.complete("m").status_code == 200
            until(lambda: any(each and each.leads for each in client.leaders().values()), "the other leads")
            assert pods.probe(2, "readinessProbe") == site.complete("m").status_code == 200
            for process in (left, gateway):
                process.send_signal(signal.SIGTERM)
            assert left.wait() == gateway.wait() == 0
            client.close()
        assert api.of(STATEFUL_SETS, "small")["spec"]["replicas"] >= 1
