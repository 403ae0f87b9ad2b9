"""The queues of all models in one worker. Read first: ``policy.admission.dispatcher``, which decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

from gateway.queue.dispatcher_driver import ModelQueue, Ticket
from gateway.queue.replica_pool import ModelPool, SharedPeers
from gateway.routing.fleet import ServedModel
from gateway.routing.shared_counters import LOCAL, SharedCounts
from gateway.routing.worker_routers import ModelRouters
from gateway.telemetry.metrics import Metrics
from policy.config.deployment import Deployment
from policy.request import Request


class SleepingModels:
    """Models without a replica for which a request came, until the controller has been told of them."""

    def __init__(self) -> None:
        self._models: set[str] = set()
        self._added = asyncio.Event()

    def add(self, model: str) -> None:
        """A request came; once between two reports is enough."""
        if model not in self._models:
            self._models.add(model)
            self._added.set()

    def clear(self) -> None:
        """A report has told of all of them."""
        self._models.clear()
        self._added.clear()

    async def wait(self) -> None:
        await self._added.wait()
        self._added.clear()


class Admission:
    """Late binding: a request waits here, not in a replica, while no replica can take it."""

    def __init__(
        self,
        metrics: Metrics,
        routers: ModelRouters,
        deployment: Callable[[], Deployment],
        *,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        shared: SharedCounts = LOCAL,
    ) -> None:
        self._metrics = metrics
        self._routers = routers
        self._deployment = deployment
        self._weight = weight
        self._shared = shared
        self._queues: dict[str, ModelQueue] = {}
        self.sleeping = SleepingModels()

    def ticket(self, served: ServedModel, request: Request) -> Ticket:
        queue = self._queues.get(served.name)
        if queue is None or queue.served is not served:
            queue = self._queues[served.name] = self._queue(served)
        if served.asleep:
            self.sleeping.add(served.name)
        return Ticket(queue, request)

    def oldest_s(self, model: str) -> float:
        """How long the oldest request that waits for ``model`` has waited, in seconds."""
        queue = self._queues.get(model)
        return 0.0 if queue is None else queue.dispatcher.oldest_s(queue.clock())

    def news(self, model: str) -> None:
        if (queue := self._queues.get(model)) is not None:
            queue.news()

    def dismiss(self, model: str) -> None:
        """No replica of ``model`` is up and none is starting: whoever waits would wait in vain."""
        if (queue := self._queues.get(model)) is not None:
            queue.dismiss()

    def give_up(self, model: str, adapters: Set[str]) -> None:
        if (queue := self._queues.get(model)) is not None:
            queue.give_up(adapters)

    def _queue(self, served: ServedModel) -> ModelQueue:
        name = served.name

        def elsewhere() -> int:
            return sum([q.dispatcher.queue.size for q in self._queues.values() if q.served is not served])

        pool = ModelPool(served, self._routers, self._deployment, self._shared, elsewhere)
        peers = None if self._shared is LOCAL else SharedPeers(self._shared, name)
        return ModelQueue(pool, served.health, self._metrics.queues.model(name), self._weight, peers)
