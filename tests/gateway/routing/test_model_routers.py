"""A worker's routers: choices, prefixes published to other workers, and decisions kept and explained."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest

from gateway.routing.fleet import ServedModel
from gateway.routing.model_routers import KEPT, ModelRouters
from gateway.routing.replica_handle import ReplicaHandle
from gateway.routing.shared_counters import PublishedPrefixes, SharedCounts
from gateway.telemetry.metrics import WorkerMetrics
from policy.config.control import ControlConfig, SloConfig
from policy.config.deployment import Deployment, ModelSpec
from policy.engine.prefill_estimate import GENERIC
from policy.hashing import hash_name
from policy.request import Request
from policy.routing.cost import CostEstimate
from policy.routing.engine_prefix_index import PrefixIndexUpdate
from policy.types import ReplicaLoad, ReplicaPhase
from policy.wire.load_stream import CachedPrefix, LoadReport
from tests.gateway.fake_replica import ready_replica
from tests.gateway.telemetry.test_metrics import samples

CHAIN = tuple(range(100, 116, 2))
DEPTHS = tuple(range(128, 1025, 128))


class Publisher(SharedCounts):
    """What one worker published, for another to read."""

    def __init__(self) -> None:
        self.written: list[PublishedPrefixes] = []

    def publish(self, model_key: int, replica_key: int, hashes: Sequence[int]) -> None:
        self.written.append((model_key, replica_key, list(hashes)))


class Reader(SharedCounts):
    """Another worker of the host."""

    alone = False

    def __init__(self, publisher: Publisher) -> None:
        self._wall = publisher

    def published_by_others(self) -> list[PublishedPrefixes]:
        read, self._wall.written = self._wall.written, []
        return read


def routes(shared: SharedCounts | None = None, metrics: WorkerMetrics | None = None) -> ModelRouters:
    return ModelRouters(random.Random(1), shared or SharedCounts(), metrics=metrics)  # noqa: S311 - ties, not secrets


async def test_a_worker_takes_the_word_of_others_for_prefixes_that_it_did_not_name() -> None:
    publisher = Publisher()
    one, other = routes(publisher), routes(Reader(publisher))
    request = Request("m", prompt_tokens=1024, prefix=CHAIN, depths=DEPTHS)
    candidates = [handle.look() for handle in served(1).handles]
    key = candidates[0].key

    def believed() -> int:
        quote = other.choose(request, candidates, 0.0)
        assert quote is not None
        return quote.cached

    def tell(*held: CachedPrefix, gone: tuple[CachedPrefix, ...] = (), reset: bool = False) -> None:
        one.learn_cached("m", key, PrefixIndexUpdate(1, reset, held, gone))

    tell(CachedPrefix(CHAIN[1], 250), reset=True)
    assert believed() == 0  # it does not follow the server yet
    other.learn_cached("m", key, PrefixIndexUpdate(1, True, (), ()))
    tell(CachedPrefix(CHAIN[0], 100), CachedPrefix(CHAIN[1], 200, 30))
    assert believed() == 230
    tell(CachedPrefix(CHAIN[0], 100))
    assert not publisher.written  # nothing new
    tell(gone=(CachedPrefix(CHAIN[1], 0), CachedPrefix(CHAIN[0], 0)))
    assert believed() == 230  # it has forgotten the names
    tell(gone=(CachedPrefix(CHAIN[1], 230),))
    assert believed() == 100
    other.learn_cached("m", key, PrefixIndexUpdate(2, False, (CachedPrefix(CHAIN[0], 110),), ()))
    tell(CachedPrefix(CHAIN[0], 90))
    assert believed() == 110  # its own name


def served(replicas: int = 3) -> ServedModel:
    model = ServedModel("m")
    for i in range(replicas):
        handle = ReplicaHandle(ready_replica(f"r{i}"), 1.0, None)
        handle.answering = True
        model.handles.append(handle)
    return model


def prompt() -> Request:
    return Request("m", tenant="t", prompt_tokens=1040, output_tokens=10, prefix=CHAIN, depths=DEPTHS)


def choose(here: ModelRouters, model: ServedModel, request: Request) -> CostEstimate | None:
    now = asyncio.get_running_loop().time()
    return here.choose(request, [handle.look() for handle in model.handles], now)


def send(to: ModelRouters, model: ServedModel, request: Request) -> tuple[ReplicaHandle, CostEstimate]:
    quote = choose(to, model, request)
    assert quote is not None
    handle = next(handle for handle in model.handles if handle.view is quote.candidate)
    handle.begin(quote.uncached)
    to.began(request, quote, asyncio.get_running_loop().time())
    return handle, quote


async def test_workers_of_a_host_route_a_prefix_to_one_replica() -> None:
    publisher = Publisher()
    first, second, model = routes(publisher), routes(Reader(publisher)), served()
    home, quote = send(first, model, prompt())
    assert publisher.written == [(hash_name("m"), quote.candidate.key, list(CHAIN))]
    again, warm = send(second, model, prompt())
    assert again is home and warm.uncached == 1040 - 1024


async def test_prefixes_reported_by_a_replica_are_routed_to_it() -> None:
    here, model = routes(), served()
    there = model.handles[2]
    line = LoadReport(state=ReplicaPhase.READY, load=ReplicaLoad(at=0.0), prefixes=CHAIN)
    here.learn_prefixes("m", there.view.key, line)
    assert send(here, model, prompt())[0] is there
    here.forget("m", there.view.key)
    chosen = choose(here, model, prompt())
    assert chosen is not None and chosen.uncached == 1040
    first = CachedPrefix(CHAIN[0], 480)
    exact = LoadReport(state=ReplicaPhase.READY, load=ReplicaLoad(at=0.0), reset=True, held=(first,))
    here.learn_prefixes("m", there.view.key, exact)
    chosen = choose(here, model, prompt())
    assert chosen is not None and (chosen.uncached, chosen.cached) == (560, 480)
    assert there.view is chosen.candidate


async def test_decisions_are_kept_and_explained_with_their_candidates() -> None:
    here, model = routes(), served()
    request = prompt()
    handle, quote = send(here, model, request)
    send(here, model, Request("m", prompt_tokens=10))
    newest, older = here.describe(5)
    assert newest["prompt_tokens"] == 10 and older["prompt_tokens"] == 1040
    assert here.describe(1) == [newest]
    explained = json.loads(here.explain(request))
    assert explained == json.loads(json.dumps(older))
    assert explained["replica"] == handle.id and len(explained["candidates"]) == 3
    mine = next(row for row in explained["candidates"] if row["replica"] == handle.id)
    assert mine["total_s"] == pytest.approx(quote.total, abs=1e-6)
    assert mine["uncached_tokens"] == 1040
    assert here.explain(Request("m")) == b"{}"


async def test_the_kept_decisions_are_bounded() -> None:
    here, model = routes(), served()
    for _ in range(KEPT + 20):
        send(here, model, Request("m", prompt_tokens=10))
        choose(here, model, Request("m"))  # a quote that is not used
    assert len(here.describe(10 * KEPT)) == KEPT


async def test_predictions_are_measured() -> None:
    metrics = WorkerMetrics()
    here, model = routes(metrics=metrics), served()
    request = prompt()
    _, quote = send(here, model, request)
    assert here.describe(1)[0]["ttft_s"] is None
    here.timed(request, quote, quote.total * 1.2, 0.0)
    assert here.describe(1)[0]["ttft_s"] == pytest.approx(quote.total * 1.2, abs=1e-6)
    ratio = samples(metrics, "tidegate_ttft_prediction_error_ratio_bucket")
    assert (ratio['{le="0.15",model="m"}'], ratio['{le="0.175",model="m"}']) == (0.0, 1.0)
    seconds = samples(metrics, "tidegate_ttft_prediction_error_seconds_bucket")
    assert seconds['{le="0.0",model="m"}'] == 1.0


async def test_a_new_document_acts_on_the_next_choice() -> None:
    documents = [
        Deployment(models=(ModelSpec(name="m", control=ControlConfig(slo=SloConfig(ttft_p95_s=ttft))),))
        for ttft in (0.001, 60.0)
    ]
    here = ModelRouters(random.Random(1), deployment=lambda: documents[0])  # noqa: S311
    model = served(replicas=1)
    model.handles[0].begin(5000)
    assert choose(here, model, Request("m", prompt_tokens=10)) is None
    documents.pop(0)
    assert choose(here, model, Request("m", prompt_tokens=10)) is not None


async def test_service_time_grows_with_requests_in_flight() -> None:
    here, model = routes(), served()
    assert here.service_s(prompt(), [model.handles[0].view]) == 0.0  # nothing says how fast it is
    for handle in model.handles:
        handle.view.timing = GENERIC
    alone = here.service_s(prompt(), [handle.view for handle in model.handles])
    for _ in range(100):
        model.handles[0].begin()
    assert here.service_s(prompt(), [handle.view for handle in model.handles]) > 1.05 * alone
