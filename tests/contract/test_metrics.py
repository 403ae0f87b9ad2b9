"""One scrape of a running deployment under load: every documented metric and no other, and true counts.

Two gateway workers, of which one is restarted, and two replicas of the simulated engine.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gateway.worker import PUBLISH_EVERY_S
from policy.wire.metric_definitions import ENGINE_PREFIX, METRICS
from store.key_derivation import digest_of
from tests.e2e.stack import Stack, eventually, running
from tests.store.adapters.making import files, write

pytestmark = pytest.mark.process
KEYS = {"web": "key-of-web", "night": "key-of-night"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
# How the conditions begin of what a healthy deployment without GPUs has no samples of.
ABSENT = ("after the first", "with NVML", "with external models")


def document(adapter: Path) -> dict[str, Any]:
    return {
        "models": [{
            "name": "m", "engine": "sim", "sim": {"profile": "sim-small", "speed": 4.0},
            "shapes": {"s": {"cpus": 1}},
            "modes": {"s": {"shape": "s", "replicas": {"min": 2, "max": 3}}},
            "adapters": {"sources": [{"name": "sql", "path": str(adapter), "force": True}]},
            "control": {"tick_s": 1, "policy": "predictive", "slo": {"ttft_p95_s": 1.0, "itl_p95_s": 0.1}},
        }],
        "budget": {"gpus": 1, "cpus": 8},
        "tenants": [{"name": name, "keys_sha256": [digest_of(key.encode())]} for name, key in KEYS.items()],
        "gateway": {"workers": 2},
    }  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    adapter = write(tmp_path_factory.mktemp("adapter"), files())
    with running(document(adapter), "--no-ray") as found:
        found.steady("m", 2)
        yield found


class Client:
    """A client that counts what it was answered."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        time.sleep(3 * PUBLISH_EVERY_S)  # then every worker has published the requests of the start
        self.before = scraped(stack)
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.seen: list[float] = []

    @contextmanager
    def scraping(self) -> Iterator[None]:
        """Scrape all the time, and note the requests that are counted."""
        ended = threading.Event()

        def scrape() -> None:
            while not ended.wait(0.1):
                self.seen.append(total(scraped(self._stack), "tidegate_requests_total"))

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(scrape)
            try:
                yield
            finally:
                ended.set()
                running.result()

    def load(self, count: int) -> None:
        """Send ``count`` requests, some at the same time, on connections of their own: to both workers."""
        with ThreadPoolExecutor(8) as pool:
            for tenant, usage in pool.map(self._ask, range(count)):
                self.requests[tenant] += 1
                self.tokens.update(prompt=usage["prompt_tokens"], completion=usage["completion_tokens"])

    def _ask(self, number: int) -> tuple[str, dict[str, int]]:
        tenant = "web" if number % 3 else "night"
        body = {
            "model": "m" if number % 4 else "sql", "max_tokens": 8, "ignore_eos": True, "stream": True,
            "messages": [{"role": "user", "content": f"question {number}"}],
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {
            "authorization": f"Bearer {KEYS[tenant]}",
            "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
        }
        answer = httpx.post(
            f"{self._stack.base_url}/chat/completions",
            json=body,
            headers=headers,
            timeout=120,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return tenant, next(event["usage"] for event in events if event.get("usage"))


def scraped(stack: Stack) -> dict[str, Metric]:
    answer = stack.http.get(f"{stack.admin_url}/metrics", headers={"accept": OPENMETRICS})
    assert answer.headers["content-type"].startswith(OPENMETRICS)
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def total(families: dict[str, Metric], name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def restart_a_worker(stack: Stack) -> None:
    def pid() -> int:
        processes = stack.status()["supervisor"]["processes"]
        found: int = next(process["pid"] for process in processes if process["name"] == "gateway-0")
        return found

    before = pid()
    os.kill(before, signal.SIGTERM)
    eventually(lambda: pid() != before, 60, lambda: "the worker was not replaced")


@pytest.fixture(scope="module")
def loaded(stack: Stack) -> Client:
    """The client of a load with a restart of a worker in its midst."""
    client = Client(stack)
    with client.scraping():
        client.load(40)
        restart_a_worker(stack)
        client.load(40)
    began = total(client.before, "tidegate_requests_total")
    eventually(
        lambda: total(scraped(stack), "tidegate_requests_total") >= began + client.requests.total(),
        30,
        lambda: "not all requests were counted",
    )
    return client


def test_counters_are_what_the_client_counted(stack: Stack, loaded: Client) -> None:
    families = scraped(stack)
    sent = loaded.requests.total()

    def grown(name: str, **labels: str) -> float:
        return total(families, name, **labels) - total(loaded.before, name, **labels)

    assert grown("tidegate_requests_total") == sent
    assert grown("tidegate_requests_total", route="/v1/chat/completions", outcome="ok") == sent
    for name in ("ttft", "e2e", "queue_wait"):
        assert grown(f"tidegate_{name}_seconds_count") == sent
    for part in ("gateway", "queue", "network", "engine"):
        assert grown("tidegate_e2e_part_seconds_count", part=part) == sent
        assert grown("tidegate_itl_part_seconds_count", part=part) == (0 if part == "queue" else sent)
    assert grown("gen_ai_server_request_duration_seconds_count", error_type="") == sent
    assert grown("tidegate_slo_judged_total") == sent
    for kind, count in loaded.tokens.items():
        assert grown("tidegate_tokens_total", kind=kind) == count
    assert grown("gen_ai_client_token_usage_sum") == loaded.tokens.total()
    assert grown("tidegate_tenant_queue_seconds_total") == pytest.approx(
        grown("tidegate_queue_wait_seconds_sum")
    )
    for tenant, count in loaded.requests.items():
        assert grown("tidegate_tenant_requests_total", tenant=tenant, outcome="ok") == count


def test_counts_never_fall_under_load_and_a_restart(loaded: Client) -> None:
    assert loaded.seen == sorted(loaded.seen)
    assert len(set(loaded.seen)) > 2


def test_every_documented_metric_and_no_other(stack: Stack, loaded: Client) -> None:
    def missing() -> set[str]:
        families = scraped(stack)
        wanted = {name for name, metric in METRICS.items() if not metric.when.startswith(ABSENT)}
        return wanted - {name for name, family in families.items() if family.samples}

    # Heartbeats, decisions and figures of processes come every few seconds.
    eventually(lambda: not missing(), 60, lambda: f"no samples of {sorted(missing())}")
    families = scraped(stack)
    others = {name for name in families.keys() - METRICS.keys() if not name.startswith(ENGINE_PREFIX)}
    assert others == set()
    for name, metric in METRICS.items():
        assert families[name].type == metric.kind
        for sample in families[name].samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels)


def test_metrics_of_engines_have_their_replica(stack: Stack, loaded: Client) -> None:
    families = scraped(stack)
    replicas = {replica.id for replica in stack.replicas("m")}
    engines = [family for name, family in families.items() if name.startswith(ENGINE_PREFIX)]
    assert engines
    for family in engines:
        assert {sample.labels["replica"] for sample in family.samples} <= replicas
    served = total(families, "vllm:request_success_total")
    assert served >= loaded.requests.total()  # and the canaries of their starts
    assert total(families, "tidegate_scrape_missing") == 0.0


def test_a_bucket_names_the_trace_of_a_request(stack: Stack, loaded: Client) -> None:
    samples = scraped(stack)["tidegate_ttft_seconds"].samples
    assert {"trace_id": TRACE} in [sample.exemplar.labels for sample in samples if sample.exemplar]
