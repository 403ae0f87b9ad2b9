"""What other hosts reach: of a deployment the client port alone, and what docs/security.md lists listens."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.network_hosts import ADDRESS, Host, two_hosts
from tidegate.supervisor.children import ROOT

KEY = "tg-key-of-the-test"
RULES = ROOT / "deployments" / "nftables" / "tidegate.nft"
_ROW = re.compile(r"^\| (\d+(?: to \d+)?|any) \| (.+?) \| `(.+?)`", re.MULTILINE)


def documented() -> tuple[set[int], list[str]]:
    """The fixed ports in docs/security.md, and the processes with ports of the kernel's choice."""
    fixed: set[int] = set()
    anywhere = []
    for ports, _, process in _ROW.findall((ROOT / "docs" / "security.md").read_text()):
        if ports == "any":
            anywhere.append(process)
        else:
            first, _, last = ports.partition(" to ")
            fixed |= set(range(int(first), int(last or first) + 1))
    return fixed, anywhere


def tidegate(host: Host, state: Path, *words: str) -> str:
    return host.run(sys.executable, "-m", "tidegate", "--state-dir", str(state), *words, cwd=ROOT)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--no-ray"], marks=pytest.mark.process),
        pytest.param([], marks=[pytest.mark.ray, pytest.mark.long]),
    ],
    ids=["processes", "ray"],
)
def test_only_the_client_port_answers_another_host(tmp_path: Path, options: list[str]) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    document = yaml.safe_load((ROOT / "deployments" / "sim.yaml").read_text())
    document["gateway"] |= {"host": "0.0.0.0", "workers": 1}
    document["tenants"] = [{"name": "web", "keys_sha256": [digest]}]
    document["models"][0]["sim"]["start_s"] = 0.1
    file = tmp_path / "sim.yaml"
    file.write_text(yaml.safe_dump(document))
    with two_hosts() as (host, other):
        tidegate(host, tmp_path / "s", "up", str(file), *options)
        found = host.listeners()
        fixed, anywhere = documented()
        for _, port, line in found:
            assert port in fixed or any(name in line for name in anywhere), (port, line)
        assert {port for address, port, _ in found if not address.startswith("127.")} == {8080}
        assert other.reaches(ADDRESS, [port for _, port, _ in found]) == [8080]
        url, silent = f"http://{ADDRESS}:8080/v1/models", ["-s", "-o", "/dev/null", "-w", "%{http_code}"]
        assert other.run("curl", *silent, url) == "401"
        assert other.run("curl", *silent, "-H", f"Authorization: Bearer {KEY}", url) == "200"
        tidegate(host, tmp_path / "s", "down")


_OPEN = """
import socket, sys, time
servers = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("open", flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_the_shipped_firewall_rules_leave_the_client_port_and_the_admin_network(tmp_path: Path) -> None:
    if shutil.which("nft") is None:
        pytest.skip("needs nft, of Debian's package nftables")
    ports = [8080, 8081, 7070, 6379, 8265, 44227, 10_002, 19_999, 40_000, 22]
    trusting = tmp_path / "trusting.nft"
    trusting.write_text(RULES.read_text().replace("192.0.2.0/28", f"{ADDRESS.rpartition('.')[0]}.0/24"))
    opening = (sys.executable, "-c", _OPEN, *map(str, ports))
    with two_hosts() as (host, other), host.start(*opening) as opened:
        assert opened.stdout is not None and opened.stdout.readline() == "open\n"
        assert other.reaches(ADDRESS, ports) == ports
        host.run("nft", "-c", "-f", str(RULES))
        host.run("nft", "-f", str(RULES))
        assert other.reaches(ADDRESS, ports) == [8080, 22]
        host.run("nft", "-f", str(trusting))
        assert other.reaches(ADDRESS, ports) == [8080, 8081, 22]
        assert len(json.loads(host.run("nft", "-j", "list", "chains"))["nftables"]) == 2
        assert host.reaches("127.0.0.1", ports) == ports
        opened.kill()
