"""Counts of a worker for the controller, and when they are sent: in virtual time, then by real workers."""

from __future__ import annotations

import asyncio
import functools
import io
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from gateway.control.report_sender import Reporter, ReportSender
from gateway.protocol.paths import ROUTES
from gateway.protocol.usage import TokenUsage
from gateway.queue.admission import Admission
from gateway.request_context import RequestContext
from gateway.routing.fleet import ServedModel
from gateway.routing.model_routers import ModelRouters
from gateway.telemetry.metrics import ModelCounters, WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from policy.config.control import ControlConfig, SloConfig
from policy.config.deployment import Deployment, ModelSpec
from policy.errors import Refusal
from policy.request import Request
from policy.stats.histogram import bucket_of
from policy.types import EngineKind, Priority
from policy.wire.controller_reports import GatewayReport, ModelReport, ReportAnswer, WaitingRequests
from tests.gateway.fake_replica import SECRET, FakeController
from tests.gateway.virtual_time import run_virtual
from tests.gateway.worker import Stack, until

EXTERNAL = ModelSpec(name="theirs", engine=EngineKind.EXTERNAL, urls=("http://t:1",))
SLO = SloConfig(ttft_p95_s=1.0, itl_p95_s=0.05)


def ended(
    meter: ModelCounters,
    outcome: str = "ok",
    *,
    ttft_s: float | None = None,
    gap_s: float = 0.0,
    e2e_s: float = 2.0,
    usage: TokenUsage | None = None,
    path: str = "/v1/chat/completions",
    elsewhere: bool = False,
    probe: bool = False,
) -> None:
    """A call that has ended."""

    async def unused() -> Any: ...

    call = RequestContext(ROUTES[path], {"headers": []}, unused, lambda message: unused())
    call.outcome, call.usage, call.by_fallback, call.probe = outcome, usage, elsewhere, probe
    if ttft_s is not None:
        call.first_byte_at, call.events, call.last_event_at = 10.0 + ttft_s, 11, 10.0 + ttft_s + 10 * gap_s
    meter.arrive(100, probe=call.probe)
    meter.in_flight -= 1
    meter.count(call, 10.0, 10.0 + e2e_s)


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs in virtual time."""

    @functools.wraps(test)
    def run() -> None:
        run_virtual(test)

    return run


class Site:
    """A reporter over a worker's admission, and a controller that answers ``late_s`` seconds late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.metrics = WorkerMetrics()
        self.deployment = Deployment(models=(ModelSpec(name="m"), ModelSpec(name="other"), EXTERNAL))
        self.admission = Admission(
            self.metrics,
            ModelRouters(random.Random(1)),  # noqa: S311 - ties, not secrets
            lambda: self.deployment,
        )
        self.reports: list[tuple[float, GatewayReport]] = []
        self.late_s = late_s
        self.clock = asyncio.get_running_loop().time
        self.wants_detail = False
        self.reporter = Reporter(
            self.metrics,
            self.admission,
            lambda: self.deployment,
            self._send,
            running=lambda: {"m": (2, 50)},
            routes=lambda count: [{"at": 1.0}],
        )
        self.served = ServedModel("m")
        self.running = asyncio.create_task(self.reporter.run())

    async def _send(self, body: bytes) -> bytes:
        self.reports.append((round(self.clock(), 3), msgspec.json.decode(body, type=GatewayReport)))
        await asyncio.sleep(self.late_s)
        return msgspec.json.encode(ReportAnswer(wants_detail=self.wants_detail))

    def ask(self, *, wait_s: float = 60.0) -> asyncio.Task[Any]:
        """A request that waits for a replica."""
        now = self.clock()
        request = Request("m", arrived=now, deadline=now + wait_s)
        self.metrics.model("m").arrive(10, probe=False)
        return asyncio.create_task(self.admission.ticket(self.served, request).wait())

    @property
    def instants(self) -> list[float]:
        return [at for at, _ in self.reports]

    async def report(self) -> ModelReport:
        return (await self.reporter.report()).models["m"]

    async def close(self, *asked: asyncio.Task[Any]) -> None:
        for task in (*asked, self.running):
            task.cancel()
        await asyncio.gather(*asked, self.running, return_exceptions=True)


@in_virtual_time
async def test_details_are_reported_while_the_controller_wants_them() -> None:
    site = Site()
    asked = [site.ask(), site.ask()]
    await asyncio.sleep(1.5)
    site.wants_detail = True  # the answer at 2 s says so
    await asyncio.sleep(1.0)
    site.wants_detail = False
    await asyncio.sleep(3.0)
    (detail,) = [report.detail for at, report in site.reports if at == 3.0]
    assert detail is not None
    assert detail.waiting == (WaitingRequests(model="m", priority=Priority.STANDARD, requests=2),)
    assert detail.routes == ({"at": 1.0},)
    assert all(report.detail is None for at, report in site.reports if at != 3.0)
    await site.close(*asked)


@in_virtual_time
async def test_each_outcome_is_counted_once() -> None:
    site = Site()
    meter = site.metrics.model("m")
    meter.totals.set_slo(ControlConfig(slo=SLO))
    ended(meter, ttft_s=0.5, gap_s=0.01, usage=TokenUsage(100, 40, 11))
    ended(meter, ttft_s=3.0, gap_s=0.01, usage=TokenUsage(100, 0, 11))
    ended(meter, ttft_s=0.5, gap_s=0.2)
    ended(meter, e2e_s=0.3, usage=TokenUsage(7, 0, 1))  # complete
    ended(meter, ttft_s=0.5, outcome=Refusal.STREAM_BROKEN, usage=TokenUsage(0, 0, 5, exact=False))
    ended(meter, outcome="cancelled")
    ended(meter, outcome=Refusal.UPSTREAM_FAILED)
    for reason in (Refusal.QUEUE_FULL, Refusal.OVERLOADED, Refusal.DEADLINE, Refusal.NO_REPLICA):
        ended(meter, outcome=reason)
    report = await site.report()
    assert (report.arrived, report.ended, report.refused) == (11, 4, 4)
    assert (report.input_tokens, report.cached_tokens, report.output_tokens) == (207, 40, 23)
    assert (report.judged, report.met_ttft, report.met_itl, report.met_both) == (3, 2, 2, 1)
    assert (sum(report.ttft), sum(report.itl), sum(report.e2e)) == (4, 3, 4)
    assert (report.ttft[bucket_of(3.0)], report.itl[bucket_of(0.2)], report.e2e[bucket_of(0.3)]) == (1, 1, 1)
    assert (report.in_flight, report.queued, report.oldest_s) == (0, 0, 0.0)
    site.metrics.publish()  # publishing resets the counts for scrapes only
    assert (await site.report()) == report
    await site.close()


@in_virtual_time
async def test_requests_not_answered_by_replicas_count_as_arrivals_only() -> None:
    site = Site()
    meter = site.metrics.model("m")
    usage = TokenUsage(prompt=100, cached=0, completion=20)
    ended(meter, ttft_s=0.2, gap_s=0.01, usage=usage, elsewhere=True)
    ended(meter, "stream_broken", ttft_s=0.2, elsewhere=True)
    ended(meter, path="/v1/tokenize")
    ended(meter, path="/v1/detokenize")
    assert (await site.report()) == ModelReport(arrived=4, arrived_tokens=400, running=2, running_tokens=50)
    assert sum(meter.streams.values()) == 1  # metrics count every stream
    ended(meter, ttft_s=0.2, gap_s=0.01, usage=usage, probe=True)
    assert (await site.report()).arrived == 4
    await site.close()


@in_virtual_time
async def test_a_stream_is_judged_by_the_slo_at_its_end() -> None:
    site = Site()
    meter = site.metrics.model("m")
    ended(meter, ttft_s=50.0, gap_s=5.0)
    assert ((await site.report()).judged, (await site.report()).met_both) == (1, 1)
    meter.totals.set_slo(ControlConfig(slo=SloConfig(ttft_p95_s=1.0)))
    ended(meter, ttft_s=50.0, gap_s=5.0)
    assert ((await site.report()).judged, (await site.report()).met_ttft, (await site.report()).met_itl) == (
        2,
        1,
        2,
    )
    meter.served_stream(0.1, 0.0)  # a single event has no gap
    report = await site.report()
    assert (sum(report.itl), report.met_both) == (2, 2)
    await site.close()


@in_virtual_time
async def test_a_worker_reports_every_second_on_models_of_the_controller() -> None:
    site = Site()
    await asyncio.sleep(3.5)
    assert site.instants == [0.0, 1.0, 2.0, 3.0]
    reports = [report for _, report in site.reports]
    assert [report.number for report in reports] == [1, 2, 3, 4]
    assert [report.since_s for report in reports] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert {report.worker for report in reports} == {reports[0].worker}
    assert all(set(report.models) == {"m", "other"} and not report.last for report in reports)
    assert (await Site().reporter.report()).worker != reports[0].worker
    await site.close()


@in_virtual_time
async def test_a_request_for_a_sleeping_model_is_reported_at_once() -> None:
    site = Site()
    site.served.down = site.served.asleep = True
    await asyncio.sleep(0.3)
    asked = [site.ask(), site.ask()]
    await asyncio.sleep(0.02)
    asked.append(site.ask())
    await asyncio.sleep(0.2)
    assert site.instants == [0.0, 0.35]
    report = site.reports[-1][1].models["m"]
    assert (report.arrived, report.queued, report.in_flight) == (3, 3, 3)
    assert report.oldest_s == pytest.approx(0.05)
    asked.append(site.ask())  # the controller knows already
    await asyncio.sleep(1.0)
    assert site.instants == [0.0, 0.35, 1.0]
    site.served.asleep = False  # it starts one
    asked.append(site.ask())
    await asyncio.sleep(0.4)
    assert site.instants == [0.0, 0.35, 1.0]
    assert not any(task.done() for task in asked)
    await site.close(*asked)


@in_virtual_time
async def test_a_report_that_was_lost_is_contained_in_the_next() -> None:
    site = Site(late_s=2.0)  # as long as one waits for a controller that does not answer
    site.served.asleep = True
    await asyncio.sleep(0.5)
    asked = site.ask()
    await asyncio.sleep(5.0)
    assert site.instants == [0.0, 2.05, 4.05]
    assert [report.models["m"].arrived for _, report in site.reports] == [0, 1, 1]
    await site.close(asked)


@in_virtual_time
async def test_no_report_follows_the_last_report() -> None:
    site = Site(late_s=0.1)
    await asyncio.sleep(1.05)  # in the middle of a report
    ended(site.metrics.model("m"))
    await site.reporter.leave()
    await asyncio.sleep(3.0)
    last = site.reports[-1][1]
    assert [report.last for _, report in site.reports] == [False, False, True]
    assert (last.number, last.models["m"].ended) == (3, 1)
    await site.close()


# To the controller and back.


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    controller = FakeController()
    await controller.start()
    yield controller
    await controller.stop()


def post_to(controller: FakeController) -> tuple[ReportSender, io.StringIO]:
    logged = io.StringIO()
    return ReportSender(f"127.0.0.1:{controller.port}", "/signals", SECRET, StructuredLog(0, logged)), logged


async def test_reports_resume_when_the_controller_restarts(controller: FakeController) -> None:
    post, logged = post_to(controller)
    await post.send(b"{}")
    await controller.stop()
    await post.send(b"{}")
    await post.send(b"{}")
    assert logged.getvalue().count("report_lost") == 1
    await controller.start()
    await post.send(b"{}")
    assert len(controller.reports) == 2
    post.close()


async def test_reports_go_to_the_controller_that_leads(controller: FakeController) -> None:
    logged = io.StringIO()
    post = ReportSender(
        f"127.0.0.1:9,127.0.0.1:{controller.port}", "/signals", SECRET, StructuredLog(0, logged)
    )
    for _ in range(3):
        await post.send(b"{}")
    assert len(controller.reports) == 2
    post.close()


# Real workers.


def last_report(stack: Stack, model: str = "alpha") -> dict[str, Any]:
    found: dict[str, Any] = stack.controller.reports[-1]["models"][model]
    return found


@pytest.mark.process
async def test_a_request_for_a_model_at_zero_wakes_it_and_is_served(stack: Stack) -> None:
    await stack.start_controller()
    stack.controller.models = [{"name": "alpha", "engine": "sim", "target": 0}]
    await stack.start_worker()
    stack.controller.set()
    await until(lambda: bool(stack.controller.reports))
    await until(lambda: _knows(stack, "alpha"))
    asked = asyncio.create_task(stack.chat())
    await until(lambda: last_report(stack).get("queued") == 1)
    replica = await stack.replica("woken")
    stack.controller.set(replica)
    assert (await asked).status_code == 200
    await until(lambda: last_report(stack).get("ended") == 1)
    assert (
        last_report(stack)["arrived"],
        last_report(stack).get("queued", 0),
        last_report(stack).get("refused", 0),
    ) == (1, 0, 0)


@pytest.mark.process
async def test_streams_answers_and_embeddings_are_in_the_last_report(stack: Stack) -> None:
    await stack.start_controller()
    await stack.start_worker()
    replica, vectors = await stack.replica("one"), await stack.replica("two", model="vectors")
    await stack.ready(replica, vectors)
    assert (await stack.chat()).status_code == 200
    assert (await stack.chat(stream=True)).status_code == 200
    for _ in range(2):
        answer = await stack.http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
        assert answer.status_code == 200
    stack.workers[0].send_signal(signal.SIGTERM)
    assert await stack.workers[0].wait() == 0
    last = stack.controller.reports[-1]
    assert last["last"]
    alpha = last["models"]["alpha"]
    assert (alpha["arrived"], alpha["ended"], alpha["judged"], alpha["met_both"]) == (2, 2, 1, 1)
    assert (sum(alpha["ttft"]), sum(alpha["e2e"])) == (1, 2)
    assert (last["models"]["vectors"]["arrived"], last["models"]["vectors"]["ended"]) == (2, 2)
    assert alpha["input_tokens"] >= 1


async def _knows(stack: Stack, model: str) -> bool:
    fleet = (await stack.admin.get("/admin/fleet")).json()["fleet"]
    return [known["name"] for known in fleet["models"]] == [model]
