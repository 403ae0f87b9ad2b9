"""The answer to a scrape: gateway workers, controller and engines, as one text of Prometheus or OpenMetrics.

Controller and engines are asked at each scrape, within :data:`SCRAPE_S`. What does not answer is left out
and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import isnan
from typing import NamedTuple

import httpx
import msgspec
from prometheus_client import Metric as Family
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.samples import Exemplar as Shown
from prometheus_client.utils import floatToGoString

from gateway.http.internal_client import internal_client
from gateway.telemetry.engine_metrics import EngineMetrics
from gateway.telemetry.exemplars import Exemplar
from gateway.telemetry.metrics import WorkerMetrics
from policy.config.deployment import Deployment
from policy.stats.histogram import SECONDS
from policy.types import Replica, ReplicaPhase
from policy.wire.controller import METRICS as CONTROLLER_METRICS
from policy.wire.metric_definitions import GROUPS, METRICS, WORKERS, Metric, MetricType, Samples

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_END = b"# EOF\n"
# Not the name of a replica.
CONTROLLER = ""
COUNTED_BY_WORKERS = frozenset(
    metric for group in GROUPS if group.source == WORKERS for metric in group.metrics
)
# Prometheus waits for 10 s by default.
SCRAPE_S = 2.0
# Replicas that are asked at the same time.
AT_ONCE = 32
# Of one replica: vLLM with many adapters has some 200 KB.
MAX_BYTES = 4 * 1024 * 1024
_VERSION = importlib.metadata.version("tidegate")
_EDGES: dict[str, int] = {
    floatToGoString(edge): i  # type: ignore[no-untyped-call]
    for i, edge in enumerate((*SECONDS, float("inf")))
}


class ScrapedReplica(NamedTuple):
    """A replica whose engine is asked, if it has a ``url``; ``round_trip_s`` is 0 where it is not known.

    ``server`` is one that Tidegate does not deploy.
    """

    model: str
    id: str
    url: str
    round_trip_s: float
    server: Replica | None = None


class Scraper:
    """``deployment`` and ``replicas`` return those of the moment."""

    def __init__(
        self,
        metrics: WorkerMetrics,
        secret: str,
        deployment: Callable[[], Deployment],
        replicas: Callable[[], Sequence[ScrapedReplica]],
    ) -> None:
        self._metrics = metrics
        self._deployment = deployment
        self._replicas = replicas
        self._http = internal_client(secret, timeout=SCRAPE_S)
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._scraping = asyncio.Lock()

    async def scrape(self, names: Collection[str] = (), *, openmetrics: bool = False) -> bytes:
        """The text of all metrics, or of those of Tidegate with one of ``names``, with or without ``_total``.

        It is made in a thread, one at a time: many workers and models take 100 milliseconds. Controller and
        engines are asked only for what they count.
        """
        chosen = [
            each for each in METRICS.values() if not names or not {each.name, each.series}.isdisjoint(names)
        ]
        async with self._scraping:
            replicas = self._replicas()
            samples = _samples(replicas)
            answers: dict[str, bytes] = {}
            if not COUNTED_BY_WORKERS.issuperset(chosen):
                answers = await self._others(samples, () if names else replicas)
            with contextlib.suppress(OSError):  # the counts as they were last published
                for _ in self._metrics.slices():
                    await asyncio.sleep(0)
            return await asyncio.to_thread(self._text, chosen, samples, answers, openmetrics)

    async def _others(self, samples: Samples, replicas: Sequence[ScrapedReplica]) -> dict[str, bytes]:
        """The answers of engines and controller; ``samples`` gets the number of those that are missing."""
        deployment = self._deployment()
        urls = {replica.id: f"{replica.url}/metrics" for replica in replicas if replica.url}
        addresses = deployment.cluster.controllers if deployment.needs_controller else ()
        controllers = {
            f"{CONTROLLER} {address}": f"http://{address}{CONTROLLER_METRICS}" for address in addresses
        }
        answers = await self._answers(urls | controllers)
        # One of them leads, and answers.
        for key in controllers:
            if (body := answers.pop(key, None)) is not None:
                answers[CONTROLLER] = body
        if deployment.needs_controller:
            self._missing(samples, "controller", CONTROLLER not in answers)
        self._missing(samples, "replica", len(urls.keys() - answers.keys()))
        return answers

    async def close(self) -> None:
        await self._http.aclose()

    def _missing(self, samples: Samples, source: str, count: int) -> None:
        self._metrics.scrape_misses.labels(source).inc(count)
        samples.setdefault("tidegate_scrape_missing", []).append(((source,), count))

    async def _answers(self, urls: Mapping[str, str]) -> dict[str, bytes]:
        """The bodies that came in time, by the keys of ``urls``."""
        asked = {key: asyncio.create_task(self._get(url)) for key, url in urls.items()}
        if asked:
            _, late = await asyncio.wait(asked.values(), timeout=SCRAPE_S)
            for task in late:
                task.cancel()
        bodies = {key: task.result() for key, task in asked.items() if task.done()}
        return {key: body for key, body in bodies.items() if body is not None}

    async def _get(self, url: str) -> bytes | None:
        try:
            async with self._at_once, self._http.stream("GET", url) as answer:
                body = b""
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > MAX_BYTES:
                        return None
                return body if answer.status_code == httpx.codes.OK else None
        except httpx.HTTPError:
            return None

    def _text(
        self, chosen: Sequence[Metric], samples: Samples, answers: dict[str, bytes], openmetrics: bool
    ) -> bytes:
        if (controller := answers.pop(CONTROLLER, None)) is not None:
            for name, more in msgspec.json.decode(controller, type=Samples).items():
                samples.setdefault(name, []).extend(more)
        engine_metrics = EngineMetrics()
        for replica, text in answers.items():
            engine_metrics.add(replica, text)
        families = _Families(chosen, self._metrics, samples, openmetrics)
        own: bytes = generate_openmetrics(families) if openmetrics else generate_latest(families)  # type: ignore[no-untyped-call]
        text = own.removesuffix(_END) + engine_metrics.text(openmetrics=openmetrics)
        return text + _END if openmetrics else text


class _Families:
    """The families of ``chosen``, in their order, as a registry collects them."""

    def __init__(
        self, chosen: Sequence[Metric], metrics: WorkerMetrics, samples: Samples, openmetrics: bool
    ) -> None:
        self._chosen = chosen
        self._metrics = metrics
        self._samples = samples
        self._openmetrics = openmetrics

    def collect(self) -> Iterator[Family]:
        kinds = {metric.kind for metric in self._chosen}
        collected = {family.name: family for family in self._metrics.collect(kinds)}
        shown = self._metrics.exemplars.all() if self._openmetrics else {}
        marked = {exemplar.metric for exemplar in shown.values()}
        for metric in self._chosen:
            family = Family(metric.name, metric.text, metric.kind)
            if metric.name.endswith(f"_{metric.unit}"):
                family.unit = metric.unit
            if (own := collected.get(metric.name)) is not None:
                family.samples = [
                    each for each in own.samples if not (each.name.endswith("_created") or isnan(each.value))
                ]
                if self._openmetrics and own.type == MetricType.HISTOGRAM:
                    _drop_sum(family)
            if metric.name in marked:
                _mark(family, shown)
            _add(family, metric, self._samples.get(metric.name, ()))
            yield family


def _samples(replicas: Sequence[ScrapedReplica]) -> Samples:
    """What this worker knows at the moment of a scrape."""
    trips: list[tuple[tuple[str, ...], float]] = [
        ((each.model, each.id), each.round_trip_s) for each in replicas if each.round_trip_s
    ]
    servers = [each.server for each in replicas if each.server is not None]
    kinds = Counter((each.model, each.shape, each.mode, str(each.state)) for each in servers)
    ready = [each for each in servers if each.state is ReplicaPhase.READY]
    adapters = Counter((each.model, name) for each in ready for name in each.adapters)
    return {
        "tidegate_round_trip_seconds": trips,
        "tidegate_build_info": [((_VERSION,), 1)],
        "tidegate_external_servers": list(kinds.items()),
        "tidegate_external_server_adapters": list(adapters.items()),
    }


def _add(family: Family, metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]]) -> None:
    for values, value in samples:
        if len(values) == len(metric.labels) and metric.kind is not MetricType.HISTOGRAM:
            labels = dict(zip(metric.labels, values, strict=True))
            family.add_sample(metric.series, labels, value)


def _drop_sum(family: Family) -> None:
    """Leave out sum and count if observations may be negative: OpenMetrics does not allow them then."""
    if any(each.labels.get("le", "").startswith("-") for each in family.samples):
        family.samples = [each for each in family.samples if each.name.endswith("_bucket")]


def _mark(family: Family, exemplars: Mapping[tuple[str, str, int], Exemplar]) -> None:
    """Put the exemplars of a family on its buckets."""
    for i, sample in enumerate(family.samples):
        edge = _EDGES.get(sample.labels.get("le", ""), -1)
        if (found := exemplars.get((family.name, sample.labels["model"], edge))) is not None:
            shown = Shown({found.label: found.id}, found.value, found.at)
            family.samples[i] = sample._replace(exemplar=shown)
