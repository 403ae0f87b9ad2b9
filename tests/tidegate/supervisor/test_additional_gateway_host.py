"""`tidegate gateway`: a second gateway host for the controller of the first."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.ports import free_ports
from tests.tidegate.conftest import Command, Site, until

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.fixture
def second(site: Site, tmp_path: Path) -> Iterator[Site]:
    port, admin_port = free_ports(2)
    folder = tmp_path / "second"
    folder.mkdir()
    made = replace(site, folder=folder, port=port, admin_port=admin_port)
    yield made
    made.tidegate("down")
    assert made.pids() == []


def start(first: Site, second: Site, secret: Path) -> Command:
    controller = json.loads(first.file.read_text())["cluster"]["controller"]
    return second.popen(
        "gateway", "--controller", controller, "--secret-file", str(secret), "--workers", "1",
        "--port", str(second.port), "--admin-port", str(second.admin_port), "--timeout-s", "60",
    )  # fmt: skip


def is_ready(site: Site) -> bool:
    supervisor = site.status()["supervisor"]
    return supervisor is not None and supervisor["phase"] == "ready"


def test_a_gateway_of_another_host_serves_follows_and_serves_on(site: Site, second: Site) -> None:
    document = site.shipped("sim.yaml")
    document["gateway"]["drain_delay_s"] = 3.0
    site.up(document)
    wrong = second.folder / "wrong"
    wrong.write_text("x" * 32)
    with start(site, second, wrong) as command:
        _, err = command.communicate(timeout=60)
        assert command.returncode != 0
        assert "the internal secret is missing or wrong" in err
    with start(site, second, site.state / "secret") as command:
        until(lambda: is_ready(second), "the second gateway is ready")
        assert second.status()["supervisor"]["actuator"] == "remote"
        assert second.complete("sim").status_code == 200
        # It takes a change that is applied at the first host, and refuses one of its own.
        document["tenants"] = [{"name": "web", "keys_sha256": ["0" * 64]}]
        site.file.write_text(json.dumps(document))
        assert second.tidegate("apply", str(site.file))[0] != 0
        assert site.tidegate("apply", str(site.file))[0] == 0
        until(lambda: second.complete("sim").status_code == 401, "the second host asks for keys")
        del document["tenants"]
        site.file.write_text(json.dumps(document))
        assert site.tidegate("apply", str(site.file))[0] == 0
        until(lambda: second.complete("sim").status_code == 200, "keys are no longer needed")
        # The first host dies at once: the second one keeps what it knew, also over a restart of its worker.
        for pid in site.pids():
            os.kill(pid, signal.SIGSTOP)
        try:
            os.kill(second.workers()["gateway-0"], signal.SIGKILL)
            until(lambda: second.status()["fleet"]["models"], "the restarted worker knows the models")
        finally:
            for pid in site.pids():
                os.kill(pid, signal.SIGCONT)
        until(lambda: second.complete("sim").status_code == 200, "the second host serves again")
        # It stops as load balancers expect: not ready, then serving for a while, then gone.
        command.send_signal(signal.SIGTERM)
        ready = f"http://127.0.0.1:{second.admin_port}/readyz"
        until(lambda: httpx.get(ready, trust_env=False).status_code == 503, "it is not ready any more")
        assert second.complete("sim").status_code == 200
        command.communicate(timeout=60)
        assert command.returncode == 0


REPLICAS, GROUPS, REQUESTS, CLIENTS = 4, 24, 240, 8
# Characters of a prompt, and of its beginning that a group of requests shares.
PROMPT, SHARED = 3000, 2400


def hit_rate(sites: Sequence[Site], seed: int) -> float:
    """The part of the prompt tokens that replicas find cached, of requests that take turns at ``sites``."""
    chance = random.Random(seed)  # noqa: S311 - the same each time

    def text(size: int) -> str:
        return "".join(chance.choices("abcdefgh ", k=size))

    shared = [text(SHARED) for _ in range(GROUPS)]
    prompts = [chance.choice(shared) + text(PROMPT - SHARED) for _ in range(REQUESTS)]
    turns = zip(itertools.cycle(sites), prompts, strict=False)

    def ask(turn: tuple[Site, str]) -> tuple[int, int]:
        url = f"http://127.0.0.1:{turn[0].port}/v1/completions"
        body = {"model": "sim", "prompt": turn[1], "max_tokens": 2}
        usage = httpx.post(url, json=body, timeout=120, trust_env=False).raise_for_status().json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    with ThreadPoolExecutor(CLIENTS) as threads:
        cached, prompt = zip(*threads.map(ask, turns), strict=True)
    return sum(cached) / sum(prompt)


def test_prefix_hits_of_two_gateway_hosts_are_those_of_one(site: Site, second: Site) -> None:
    document = site.shipped("sim.yaml")
    document["models"][0]["modes"]["multi-replica"]["replicas"] = REPLICAS
    site.up(document)
    with start(site, second, site.state / "secret") as command:
        until(lambda: is_ready(second), "the second gateway is ready")
        one, two = hit_rate([site], 1), hit_rate([site, second], 2)
        most = SHARED / PROMPT * (1 - GROUPS / REQUESTS)
        assert one > 0.8 * most
        assert two > one - 0.03, (one, two)
        command.send_signal(signal.SIGTERM)
        command.communicate(timeout=60)
