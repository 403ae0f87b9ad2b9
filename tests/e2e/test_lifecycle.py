"""Counts, modes and kills on real vLLM and real Ray, under streams that must not be interrupted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import yaml

from tests.e2e.conftest import CHAT, changed
from tests.e2e.stack import ROOT, Stack, eventually
from tests.e2e.traffic import PATIENCE_S, Traffic

SHIPPED = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu-modes.yaml").read_text())
pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(1200, func_only=True)]


@pytest.fixture
def decided(stack: Stack) -> Iterator[Stack]:
    """Load decides, within the objective that ships and in less time; afterwards nobody does.

    The other model leaves meanwhile: with its core Ray has no room for two more beside the large replica. And
    the controller starts anew, without its memory: it is to decide by what this test asks, not by what was
    before.
    """
    with changed(stack) as chat:
        stack.document |= {"models": [chat], "budget": SHIPPED["budget"]}
        control = chat["control"]
        control["slo"] = SHIPPED["models"][0]["control"]["slo"]
        control["mode"] |= {"confirm_s": 10, "dwell_s": 20}
        control["scale"] = {"hold_s": 15}
        stack.apply()
        eventually(lambda: [model.name for model in stack.controller.status().models] == [CHAT], 240)
        before = stack.controller.status()
        os.kill(before.pid, signal.SIGKILL)
        stack.state.memory_path.unlink()
        eventually(lambda: stack.controller.status().epoch > before.epoch, 120)
        with _one_client(stack):
            eventually(lambda: _cheapest(stack) == "single-large", 240, lambda: _why(stack))
        assert stack.run("mode", CHAT, "auto").returncode == 0
        yield stack


@pytest.mark.usefixtures("idle_cores")
def test_the_load_switches_the_mode_without_interrupting_a_stream(decided: Stack) -> None:
    """One client is served fastest by one replica on both cores; many clients by a replica on each."""
    stack = decided
    assert stack.model(CHAT).mode == "single-large"
    with Traffic(stack, CHAT, clients=12, max_tokens=64, pause_s=0.0) as many:
        eventually(lambda: stack.model(CHAT).mode == "multi-replica", 300, lambda: _why(stack))
        stack.steady(CHAT, 2)
        small = {replica.id for replica in stack.replicas(CHAT)}
        eventually(lambda: small <= many.replicas, 240, lambda: f"served: {many.replicas}")
    with _one_client(stack) as one:
        eventually(lambda: stack.model(CHAT).mode == "single-large", 400, lambda: _why(stack))
        stack.steady(CHAT, 1)
        large = {replica.id for replica in stack.replicas(CHAT)}
        eventually(lambda: large <= one.replicas, 240, lambda: f"served: {one.replicas}")
    assert not many.problems + one.problems
    assert {replica.split("-")[1] for replica in many.replicas | one.replicas} == {"large", "small"}
    events = [event for event in stack.controller.status().events if " is predicted to " in event]
    for mode in ("multi-replica", "single-large"):
        assert any(f"{mode} is predicted to " in event for event in events), events


# What ends an engine's own process ends a simulated one as well: tests/faults has that in each run.
@pytest.mark.parametrize(
    "victim", ["VLLM::EngineCore", pytest.param("the engine's own process", marks=pytest.mark.long)]
)
def test_a_killed_engine_leaves_the_fleet_and_is_restarted(stack: Stack, victim: str) -> None:
    stack.steady(CHAT, 1)
    (before,) = stack.replicas(CHAT)
    family = [psutil.Process(before.pid), *psutil.Process(before.pid).children(recursive=True)]
    killed = next((p for p in family if victim in " ".join(p.cmdline())), family[0])
    with Traffic(stack, CHAT, clients=1, max_tokens=200) as streaming:
        # A request without a first event would be retried elsewhere.
        assert streaming.first_event.wait(120)
        killed.kill()
        eventually(lambda: not any(r.state == "ready" for r in stack.replicas(CHAT)), 2.0)
        # Requests that had not begun wait in the queue for the engine's return.
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: _complete(stack), range(4)))
        streaming.stop()
    assert answers == [200] * 4
    # A started stream ends with an error event: never as complete, never silently.
    first, *later = streaming.outcomes
    assert "no [DONE]" in first.problem
    assert "error" in first.problem
    assert not [outcome.problem for outcome in later if outcome.problem]
    stack.steady(CHAT, 1)
    (after,) = stack.replicas(CHAT)
    assert (after.id, after.incarnation) == (before.id, before.incarnation + 1)
    assert after.pid != before.pid
    assert not any(process.is_running() for process in family)


def test_a_restarted_controller_keeps_the_fleet(stack: Stack) -> None:
    stack.steady(CHAT, 1)
    before = {(r.id, r.pid) for r in stack.fleet().replicas}
    epoch = stack.controller.status().epoch
    with Traffic(stack, CHAT, clients=2) as traffic:
        os.kill(stack.controller.status().pid, signal.SIGKILL)
        eventually(lambda: stack.controller.status().epoch > epoch, 120)
        eventually(lambda: {(r.id, r.pid) for r in stack.fleet().replicas} == before, 60)
        stack.steady(CHAT, 1)
    assert not traffic.problems
    assert traffic.outcomes


def test_a_killed_ray_serve_controller_interrupts_no_stream(stack: Stack) -> None:
    stack.steady(CHAT, 1)
    before = {(r.id, r.pid) for r in stack.fleet().replicas}
    (serve_controller,) = [p for p in stack.processes() if "ray::ServeController" in " ".join(p.cmdline())]
    with Traffic(stack, CHAT, clients=2) as traffic:
        serve_controller.kill()
        eventually(lambda: _named(stack, "ray::ServeController") not in ([], [serve_controller.pid]), 240)
        stack.steady(CHAT, 1)
    assert not traffic.problems
    assert {(r.id, r.pid) for r in stack.fleet().replicas} == before


def _one_client(stack: Stack) -> Traffic:
    return Traffic(stack, CHAT, clients=1, pause_s=6.0)


def _cheapest(stack: Stack) -> str:
    """The mode that the last decision found to cost the least, whether or not it was to decide."""
    decisions = json.loads(stack.run("explain", CHAT, "--json").stdout)["decisions"]
    decision = max((each["decision"] for each in decisions), key=lambda each: each["at"])
    assert decision["at"] > stack.controller.status().epoch
    return str(min(decision["mode_forecasts"], key=lambda forecast: forecast["cost"])["mode"])


def _why(stack: Stack) -> str:
    return stack.run("explain", CHAT).stdout


def _complete(stack: Stack) -> int:
    body = {"model": CHAT, "prompt": "1 2 3", "max_tokens": 4, "temperature": 0}
    return httpx.post(
        f"{stack.base_url}/completions", json=body, timeout=PATIENCE_S, trust_env=False
    ).status_code


def _named(stack: Stack, title: str) -> list[int]:
    return [p.pid for p in stack.processes() if title in " ".join(p.cmdline())]
