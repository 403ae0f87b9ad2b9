"""A scrape joins workers, controller and engines, in bounded time and as valid OpenMetrics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gateway.protocol.usage import TokenUsage
from gateway.telemetry import scrape
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.scrape import ScrapedReplica, Scraper
from policy.config.deployment import Cluster, Deployment, ModelSpec
from policy.types import EngineKind, Priority, Replica, ReplicaLoad, ReplicaPhase
from policy.wire.metric_definitions import METRICS
from tests.gateway.fake_replica import SECRET, FakeController, FakeReplica, forever
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.worker import until

TRACEPARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ENGINE = b"# HELP vllm:x X.\n# TYPE vllm:x gauge\nvllm:x 7\n"


class Site:
    """A scraper with a controller and two replicas."""

    def __init__(self) -> None:
        self.metrics = WorkerMetrics()
        self.controller = FakeController()
        self.fakes = [FakeReplica("r1"), FakeReplica("r2")]
        self.silent_url = ""
        self.engine = EngineKind.SIM
        self.servers: list[Replica] = []
        self.scraper = Scraper(self.metrics, SECRET, self.deployment, self.replicas)

    def deployment(self) -> Deployment:
        cluster = Cluster(controller=f"127.0.0.1:{self.controller.port}")
        return Deployment(models=(ModelSpec(name="m", engine=self.engine),), cluster=cluster)

    def replicas(self) -> list[ScrapedReplica]:
        first, second = self.fakes
        url = self.silent_url or first.url
        return [
            ScrapedReplica("m", "r1", url, 0.002),
            ScrapedReplica("m", "r2", second.url, 0.002),
            *(ScrapedReplica("e", each.id, "", 0.0, each) for each in self.servers),
        ]

    async def samples(self) -> list[Sample]:
        text = (await self.scraper.scrape(openmetrics=True)).decode()
        families = list(text_string_to_metric_families(text))
        assert METRICS.keys() <= {family.name for family in families}
        return [sample for family in families for sample in family.samples]

    async def values(self, name: str) -> dict[tuple[str, ...], float]:
        return {tuple(each.labels.values()): each.value for each in await self.samples() if each.name == name}


@pytest_asyncio.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    made = Site()
    for server in (made.controller, *made.fakes):
        await server.start()
    for fake in made.fakes:
        fake.metrics = ENGINE
    yield made
    await made.scraper.close()
    for server in (made.controller, *made.fakes):
        await server.stop()


def served(began: float, *, ttft_s: float, **more: Any) -> Any:
    """A streamed chat of two tokens that was queued for 0.1 s and sent after 0.15 s."""
    fields = {
        "route": SimpleNamespace(path="/v1/chat/completions", runner="generate"), "outcome": "ok",
        "queued_s": 0.1, "request_id": b"r-1", "headers": {b"traceparent": TRACEPARENT}, "probe": False,
        "first_byte_at": began + ttft_s, "last_event_at": began + ttft_s + 0.04, "sent_at": began + 0.15,
        "round_trip_s": 0.01, "by_fallback": False, "usage": TokenUsage(10, 4, 5), "mean_gap_s": 0.04,
        "priority": Priority.STANDARD, "engine_s": -1.0, "engine_span_s": -1.0, "handled_s": 0.0,
        "events": 5, "adapter": None, "trace": None,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **more})


async def test_controller_and_engines_are_part_of_the_scrape(site: Site) -> None:
    site.controller.samples = {
        "tidegate_replicas_target": [[["m"], 3]],
        "tidegate_of_a_later_version": [[["m"], 1]],
        "tidegate_mode": [[["too", "many", "labels"], 1]],
    }
    found = await site.samples()
    assert {(each.labels["replica"], each.value) for each in found if each.name == "vllm:x"} == {
        ("r1", 7.0), ("r2", 7.0)
    }  # fmt: skip
    assert [each.value for each in found if each.name == "tidegate_replicas_target"] == [3.0]
    assert not [each for each in found if each.name in ("tidegate_of_a_later_version", "tidegate_mode")]
    assert await site.values("tidegate_round_trip_seconds") == {("m", "r1"): 0.002, ("m", "r2"): 0.002}
    assert await site.values("tidegate_scrape_missing") == {("controller",): 0.0, ("replica",): 0.0}


async def test_servers_of_others_are_counted_by_shape_and_adapter(site: Site) -> None:
    server = Replica(
        id="h:1", model="e", shape="big", mode="one", generation=0, state=ReplicaPhase.READY,
        load=ReplicaLoad(at=0.0), adapters=("sql", "chat"),
    )  # fmt: skip
    stopped = structs.replace(server, id="h:3", state=ReplicaPhase.STOPPED)
    site.servers = [server, structs.replace(server, id="h:2", adapters=("sql",)), stopped]
    assert await site.values("tidegate_external_servers") == {
        ("one", "e", "big", "ready"): 2.0, ("one", "e", "big", "stopped"): 1.0,
    }  # fmt: skip
    assert await site.values("tidegate_external_server_adapters") == {("sql", "e"): 2.0, ("chat", "e"): 1.0}


@pytest.mark.slow
async def test_what_does_not_answer_in_time_is_left_out_and_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "SCRAPE_S", 0.2)
    await site.controller.stop()
    silent = FakeUpstream()
    silent.answer = forever
    await silent.start()
    site.silent_url = silent.url
    site.fakes[1].metrics = b""  # answers 404
    assert await site.values("vllm:x") == {}
    assert await site.values("tidegate_scrape_missing") == {("controller",): 1.0, ("replica",): 2.0}
    assert await site.values("tidegate_scrape_misses_total") == {("controller",): 3.0, ("replica",): 6.0}
    await silent.stop()
    await site.controller.start()


async def test_a_model_that_left_is_not_one_whose_replicas_are_down(site: Site) -> None:
    """Each worker published 0 replicas of it for ever, which pages."""
    for name in ("down", "gone"):
        site.metrics.model(name).breakers["closed"] = 0
    assert await site.values("tidegate_replicas_up") == {("down",): 0.0, ("gone",): 0.0}
    site.metrics.model("gone").leave()
    assert await site.values("tidegate_replicas_up") == {("down",): 0.0}
    assert await site.values("tidegate_breakers") == {("down", "closed"): 0.0}
    site.metrics.model("gone").replicas_up = 2
    assert await site.values("tidegate_replicas_up") == {("down",): 0.0, ("gone",): 2.0}


async def test_a_deployment_without_a_controller_misses_none(site: Site) -> None:
    site.engine = EngineKind.EXTERNAL
    assert await site.values("tidegate_scrape_missing") == {("replica",): 0.0}
    assert not [hit for hit in site.controller.asked if hit.path == "/metrics"]


async def test_the_parts_of_a_latency_add_up(site: Site) -> None:
    site.metrics.model("m").count(served(50.0, ttft_s=0.25), 50.0, 50.5)
    for name, whole_s, engine_s in (("ttft", 0.25, 0.09), ("e2e", 0.5, 0.34)):
        sums = await site.values(f"tidegate_{name}_part_seconds_sum")
        assert sums == pytest.approx(
            {("m", "gateway"): 0.05, ("m", "queue"): 0.1, ("m", "network"): 0.01, ("m", "engine"): engine_s}
        )
        assert sum(sums.values()) == pytest.approx(whole_s)


async def test_a_replica_says_what_the_engine_took(site: Site) -> None:
    told = served(50.0, ttft_s=0.25, engine_s=0.07, engine_span_s=0.12, handled_s=0.005)
    site.metrics.model("m").count(told, 50.0, 50.5)
    first = await site.values("tidegate_ttft_part_seconds_sum")
    assert (first["m", "network"], first["m", "engine"]) == pytest.approx((0.03, 0.07))
    gaps = await site.values("tidegate_itl_part_seconds_sum")
    assert gaps == pytest.approx({("m", "gateway"): 0.001, ("m", "network"): 0.01, ("m", "engine"): 0.03})


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["tidegate_requests_total", "tidegate_in_flight"], ["tidegate_requests", "tidegate_in_flight"]),
        (["tidegate_in_flight", "nothing"], ["tidegate_in_flight"]),
        (["tidegate_replicas"], ["tidegate_replicas"]),
    ],
)
async def test_a_scrape_of_some_names_asks_only_who_counts_them(
    site: Site, names: list[str], found: list[str]
) -> None:
    await site.scraper.scrape(names)
    text = (await site.scraper.scrape(names, openmetrics=True)).decode()
    assert [family.name for family in text_string_to_metric_families(text)] == found
    assert site.controller.scrapes == (2 if "tidegate_replicas" in names else 0)


async def test_a_scrape_of_a_name_has_what_the_worker_knows_of_the_moment(site: Site) -> None:
    """Only a whole scrape had these."""
    site.servers = [
        Replica(
            id="h:1", model="e", shape="big", mode="one", generation=0, state=ReplicaPhase.READY,
            load=ReplicaLoad(at=0.0), adapters=("sql",),
        )
    ]  # fmt: skip
    names = [
        "tidegate_round_trip_seconds", "tidegate_external_servers", "tidegate_external_server_adapters",
    ]  # fmt: skip
    for name in names:
        text = (await site.scraper.scrape([name], openmetrics=True)).decode()
        (family,) = text_string_to_metric_families(text)
        assert {tuple(each.labels.values()): each.value for each in family.samples} == (
            await site.values(name)
        )
        assert family.samples
    assert site.controller.scrapes == len(names)


async def test_latencies_have_exemplars(site: Site) -> None:
    site.metrics.model("m").count(served(50.0, ttft_s=0.25), 50.0, 50.5)
    marked = {each.name: each for each in await site.samples() if each.exemplar is not None}
    assert {name: each.labels["le"] for name, each in marked.items()} == {
        "tidegate_queue_wait_seconds_bucket": "0.1",
        "tidegate_ttft_seconds_bucket": "0.3",
        "tidegate_e2e_seconds_bucket": "0.5",
    }
    exemplar = marked["tidegate_ttft_seconds_bucket"].exemplar
    assert exemplar is not None
    assert (exemplar.labels, exemplar.value) == ({"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}, 0.25)
    assert b"trace_id" not in await site.scraper.scrape()


async def test_gen_ai_metrics_are_of_the_same_requests(site: Site) -> None:
    meter = site.metrics.model("m")
    meter.count(served(50.0, ttft_s=0.25), 50.0, 50.5)
    meter.count(served(50.0, ttft_s=0.25, outcome="overloaded", first_byte_at=None), 50.0, 50.1)
    chat = ("chat", "tidegate", "m")
    duration = await site.values("gen_ai_server_request_duration_seconds_sum")
    assert duration == pytest.approx({("", *chat): 0.5, ("overloaded", *chat): 0.1})
    assert await site.values("gen_ai_server_time_to_first_token_seconds_sum") == {chat: 0.25}
    per_token = await site.values("gen_ai_server_time_per_output_token_seconds_sum")
    assert per_token == pytest.approx({chat: 0.01})
    tokens = await site.values("gen_ai_client_token_usage_sum")
    assert {key[-1]: value for key, value in tokens.items()} == {"input": 10.0, "output": 5.0}


async def test_a_scrape_leaves_the_event_loop_free(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    scraped, threads = threading.Event(), set[int]()

    def collect(kinds: object) -> list[object]:
        threads.add(threading.get_ident())
        assert scraped.wait(60)  # which the loop sets
        return []

    monkeypatch.setattr(site.metrics, "collect", collect)
    both = asyncio.gather(site.scraper.scrape(), site.scraper.scrape())
    await until(lambda: bool(threads), "it collects")
    scraped.set()
    first, second = await both
    assert first == second
    assert threading.get_ident() not in threads
