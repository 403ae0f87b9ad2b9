"""Counts, modes and deaths on real vLLM and real Ray, under streams that must not notice."""

from __future__ import annotations

import os
import signal
import time

import httpx
import psutil
import pytest

from tests.e2e.conftest import CHAT
from tests.e2e.stack import Stack, eventually
from tests.e2e.traffic import Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]


def test_a_mode_switch_and_a_scale_cut_no_stream(stack: Stack) -> None:
    assert stack.model(CHAT).mode == "single-large"
    with Traffic(stack, CHAT) as traffic:
        assert stack.run("mode", CHAT, "multi-replica").returncode == 0
        stack.steady(CHAT, 1)
        assert stack.run("scale", CHAT, "2").returncode == 0
        stack.steady(CHAT, 2)
        small = {replica.id for replica in stack.replicas(CHAT)}
        eventually(lambda: small <= traffic.replicas, 60, lambda: f"served: {traffic.replicas}")
        assert stack.run("scale", CHAT, "1").returncode == 0
        stack.steady(CHAT, 1)
        assert stack.run("mode", CHAT, "single-large").returncode == 0
        stack.steady(CHAT, 1)
        large = {replica.id for replica in stack.replicas(CHAT)}
        eventually(lambda: large <= traffic.replicas, 60, lambda: f"served: {traffic.replicas}")
    assert not traffic.problems
    assert {replica.split("-")[1] for replica in traffic.replicas} == {"large", "small"}


def test_a_killed_engine_leaves_the_fleet_and_comes_back(stack: Stack) -> None:
    stack.steady(CHAT, 1)
    (before,) = stack.replicas(CHAT)
    killed_at = time.monotonic()
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: not any(r.state == "ready" for r in stack.replicas(CHAT)), 2.0)
    assert time.monotonic() - killed_at <= 2.0
    # Requests that had not begun wait in the queue for the engine's return.
    answers = [
        httpx.post(f"{stack.base_url}/completions", json=_short(), timeout=120, trust_env=False)
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    stack.steady(CHAT, 1)
    (after,) = stack.replicas(CHAT)
    assert (after.id, after.incarnation) == (before.id, before.incarnation + 1)
    assert after.pid != before.pid


def test_the_controller_comes_back_with_the_same_fleet(stack: Stack) -> None:
    stack.steady(CHAT, 1)
    before = {(r.id, r.pid) for r in stack.fleet().replicas}
    epoch = stack.controller.status().epoch
    with Traffic(stack, CHAT, clients=2) as traffic:
        os.kill(stack.controller.status().pid, signal.SIGKILL)
        eventually(lambda: stack.controller.status().epoch > epoch, 30)
        eventually(lambda: {(r.id, r.pid) for r in stack.fleet().replicas} == before, 10)
        stack.steady(CHAT, 1)
    assert not traffic.problems
    assert traffic.outcomes


def test_serves_own_controller_may_die(stack: Stack) -> None:
    stack.steady(CHAT, 1)
    before = {(r.id, r.pid) for r in stack.fleet().replicas}
    (serve_controller,) = [p for p in stack.processes() if "ray::ServeController" in " ".join(p.cmdline())]
    with Traffic(stack, CHAT, clients=2) as traffic:
        serve_controller.kill()
        eventually(lambda: _named(stack, "ray::ServeController") not in ([], [serve_controller.pid]), 60)
        stack.steady(CHAT, 1)
    assert not traffic.problems
    assert {(r.id, r.pid) for r in stack.fleet().replicas} == before


def test_a_gateway_worker_that_dies_is_replaced(stack: Stack) -> None:
    victim = stack.processes_by_name()["gateway-0"]
    psutil.Process(victim).kill()
    eventually(lambda: stack.processes_by_name()["gateway-0"] not in (0, victim), 20)
    for _ in range(8):
        # A fresh connection each: both workers accept.
        answer = httpx.post(f"{stack.base_url}/completions", json=_short(), timeout=60, trust_env=False)
        assert answer.status_code == 200


def test_a_replica_lets_nobody_in_without_the_secret(stack: Stack) -> None:
    (replica,) = stack.replicas(CHAT)
    for path in ("/v1/models", "/metrics", "/health", "/internal/load", "/nowhere"):
        assert stack.ask_replica(replica, path, secret=False).status_code == 401
    for path in ("/health", "/load", "/version", "/v1/load_lora_adapter", "/docs", "/openapi.json", "/ping"):
        assert stack.ask_replica(replica, path).status_code == 404
    assert stack.ask_replica(replica, "/v1/models").status_code == 200
    assert "vllm:num_requests_running" in stack.ask_replica(replica, "/metrics").text


def test_up_twice_is_harmless(stack: Stack) -> None:
    before = stack.processes_by_name()
    done = stack.run("up", str(stack.file))
    assert done.returncode == 0
    assert stack.processes_by_name() == before


def _short() -> dict[str, object]:
    return {"model": CHAT, "prompt": "1 2 3", "max_tokens": 4, "temperature": 0}


def _named(stack: Stack, title: str) -> list[int]:
    return [p.pid for p in stack.processes() if title in " ".join(p.cmdline())]
