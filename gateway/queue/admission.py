"""The queues of all models in one worker. Read first: ``policy.admission.dispatcher``, which decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Final

from gateway.queue.model_queue import ModelQueue, QueueTicket
from gateway.queue.replica_pool import ModelReplicaPool, SharedTokenCounts
from gateway.routing.fleet import ServedModel
from gateway.routing.model_routers import ModelRouters
from gateway.routing.shared_counters import LOCAL, SharedCounts
from gateway.telemetry.metrics import WorkerMetrics
from policy.config.deployment import Deployment
from policy.request import Request
from policy.types import Runner

_GENERATE: Final = Runner.GENERATE
# Requests whose end is predicted in one turn of the event loop: each takes some 20 us.
DRAINS_A_TURN: Final = 64


def _equal_weight(tenant: str) -> float:
    return 1.0


@dataclass(eq=False)
class Admission:
    """Late binding: a request waits here, not in a replica, while no replica can take it.

    ``weight``: that of a tenant; ``shared``: the counts of all workers of the host. ``sleeping``: models
    without a replica for which a request came since the last report; ``woken`` is set when one is added.
    """

    metrics: WorkerMetrics
    routers: ModelRouters
    deployment: Callable[[], Deployment]
    weight: Callable[[str], float] = _equal_weight
    shared: SharedCounts = LOCAL

    def __post_init__(self) -> None:
        self._queues: dict[str, ModelQueue] = {}
        self.sleeping: set[str] = set()
        self.woken = asyncio.Event()

    def ticket(self, served: ServedModel, request: Request) -> QueueTicket:
        queue = self._queues.get(served.name)
        if queue is None or queue.served is not served:
            queue = self._queue(served)
            if not served.removed:  # what waits for the model of its name that took its place stays reachable
                self._queues[served.name] = queue
        if served.asleep and served.name not in self.sleeping:
            self.sleeping.add(served.name)
            self.woken.set()
        return QueueTicket(queue, request)

    def oldest_s(self, model: str) -> float:
        """How long the oldest request that waits for ``model`` has waited, in seconds."""
        queue = self._queues.get(model)
        return 0.0 if queue is None else queue.dispatcher.oldest_s(queue.clock())

    def waiting(self) -> Iterator[Request]:
        """The requests that wait, of all models."""
        for queue in self._queues.values():
            yield from queue.dispatcher.queue.waiting.values()

    async def drain_s(self, model: str) -> float:
        """In how many seconds the last running request of ``model`` is expected to end.

        During a switch, of those that began before: what is taken since is to extend it no further. Of
        hundreds it takes several turns of the event loop.
        """
        queue = self._queues.get(model)
        if queue is None:
            return 0.0
        dispatcher, longest_s = queue.dispatcher, 0.0
        running = dispatcher.begun_before(queue.served.closing_since)
        for first in range(0, len(running), DRAINS_A_TURN):
            if first:
                await asyncio.sleep(0)
            part = running[first : first + DRAINS_A_TURN]
            longest_s = max(longest_s, dispatcher.drain_s(queue.clock(), part))
        return longest_s

    async def whole_answers(self, model: str) -> tuple[int, int]:
        """The answers of ``model`` that run and are no streams, and the tokens that they should have by now.

        They would be unseen until they end otherwise. Only those count that should have begun.
        """
        queue = self._queues.get(model)
        if queue is None or queue.served.runner is not _GENERATE:
            return 0, 0
        now, context, answers, tokens = queue.clock(), queue.served.max_model_len, 0, 0
        running = queue.dispatcher.running
        for number, ticket in enumerate(list(running)):
            if number % DRAINS_A_TURN == DRAINS_A_TURN - 1:
                await asyncio.sleep(0)
            if ticket.shows_tokens or ticket.quote is None or ticket not in running:
                continue
            request, ran_s = ticket.request, now - ticket.taken_at
            produced = self.routers.produced_tokens(request, ticket.quote.candidate, ran_s)
            if not request.limit_tokens and context:
                produced = min(produced, max(1, context - request.prompt_tokens))
            if produced:
                answers += 1
                tokens += produced
        return answers, tokens

    def replica_changed(self, model: str) -> None:
        if (queue := self._queues.get(model)) is not None:
            queue.replica_changed()

    def dismiss(self, model: str) -> None:
        """No replica of ``model`` is up and none is starting, or it was removed: reject all that wait."""
        if (queue := self._queues.get(model)) is not None:
            queue.dismiss()

    def give_up(self, model: str, adapters: Set[str]) -> None:
        if (queue := self._queues.get(model)) is not None:
            queue.give_up(adapters)

    def _queue(self, served: ServedModel) -> ModelQueue:
        name = served.name

        def elsewhere() -> int:
            return sum([q.dispatcher.queue.size for q in self._queues.values() if q.served is not served])

        pool = ModelReplicaPool(served, self.routers, self.deployment, self.shared, elsewhere)
        peers = None if self.shared is LOCAL else SharedTokenCounts(self.shared, name)
        return ModelQueue(pool, served.health, self.metrics.model(name).queue, self.weight, peers)
