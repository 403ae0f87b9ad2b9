"""From a waiting request to a link: the shell around the pure router, one for each model."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from policy.request import Request
from policy.routing import Quote, Router

if TYPE_CHECKING:
    from gateway.fleet import Served
    from gateway.replicas import Link


class Routes:
    """The routers of all models of this worker."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._routers: dict[str, Router] = {}
        self._clock = asyncio.get_running_loop().time

    def choose(self, served: Served, request: Request) -> tuple[Link, Quote] | None:
        """Where ``request`` would go now, or ``None`` when it must wait here."""
        links = [
            link
            for link in served.links
            if link.admissible and (not request.adapter or request.adapter in link.adapters)
        ]
        if request.avoid:
            links = [link for link in links if link.id not in request.avoid] or links
        router = self._of(served.name)
        decision = router.choose(request, [link.look() for link in links], self._clock(), self._rng.random())
        if decision.chosen is None:
            return None
        chosen = decision.chosen
        return next(link for link in links if link.view is chosen.candidate), chosen

    def began(self, request: Request, quote: Quote) -> None:
        """``request`` was sent to the candidate of ``quote``."""
        self._of(request.model).began(request, quote.candidate, self._clock())

    def timed(self, request: Request, quote: Quote, ttft_s: float) -> None:
        """Its first token came ``ttft_s`` after it was sent."""
        self._of(request.model).timed(request, quote, ttft_s, self._clock())

    def _of(self, model: str) -> Router:
        router = self._routers.get(model)
        if router is None:
            router = self._routers[model] = Router()
        return router
