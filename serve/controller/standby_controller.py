"""A controller that is one of several: it stands by, leads once it is elected, and ends when it is deposed.

A deposed controller ends its process, as Kubernetes' own controllers do: nothing that it had begun goes on.
Its supervisor starts it again, and it stands by.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx
import msgspec
from msgspec.structs import replace
from starlette.types import ASGIApp, Receive, Scope, Send

from policy.errors import NotLeader
from policy.wire.controller import LEADER, Controllers, LeaderStatus, problem_of
from policy.wire.headers import SECRET_HEADER
from serve.actuator.fenced import Fence, FencedActuator, passed
from serve.actuator.interface import Actuator
from serve.controller.leadership_lease import Leadership
from serve.controller.routes import SecretProtectedApp, build_app
from serve.controller.serving import listen_soon, parts_of, serve_app
from serve.json_responses import json_answer
from store.election.database_state_dir import DatabaseStateDir

log = logging.getLogger("tidegate.controller")

# Answered without the secret: whether the process runs, and whether it knows a leader.
LIVE, READY = "/livez", "/readyz"
# How long another controller may take to say that it stands by.
ASK_S = 2.0
# Beyond the lease: how long a leader that ends at the same time may take to end its replicas.
LAST_S = 20.0


class ElectedControllerApp:
    """The HTTP API of a controller: whole while it leads; else who does, and a refusal of all other paths."""

    def __init__(self, leadership: Leadership, stopping: asyncio.Event, secret: str) -> None:
        self._leadership = leadership
        self._stopping = stopping
        self._guarded = SecretProtectedApp(self._answer, secret)
        self.whole: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] in (LIVE, READY):
            good = scope["path"] == LIVE or bool(self._leadership.status().leader)
            await json_answer({"ok": good}, 200 if good else 503)(scope, receive, send)
            return
        await self._guarded(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == LEADER:
            answer = json_answer(replace(self._leadership.status(), ending=self._stopping.is_set()))
        elif self.whole is not None and self._leadership.leads():
            await self.whole(scope, receive, send)
            return
        else:
            status = self._leadership.status()
            leader = status.leader if status.leader != status.address else ""
            error = NotLeader(
                f"the controller at {status.address} stands by"
                + (f"; that at {leader} leads in term {status.term}" if leader else "; none leads now")
            )
            answer = json_answer({"error": problem_of(error)}, 503)
        await answer(scope, receive, send)


@dataclass
class ElectedController:
    """One controller of several, known at ``address``, which listens at ``listen``.

    ``state_of`` is the leader's state of a term; ``actuator_of`` makes the actuator of a leader, once the
    ``fence`` lets no order of a lower term through, unless the actuator knows terms itself. ``addresses`` are
    those of all controllers that answer for replicas which end with the last one.
    """

    leadership: Leadership
    state_of: Callable[[int], DatabaseStateDir]
    actuator_of: Callable[[DatabaseStateDir], Actuator]
    fence: Fence | None
    secret: str
    address: str
    listen: str
    addresses: str

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping`` is set; raises :class:`policy.errors.NotLeader` when it is deposed."""
        app = ElectedControllerApp(self.leadership, stopping, self.secret)
        sock = await listen_soon(self.listen)
        server = asyncio.create_task(serve_app(app, sock))
        contending = asyncio.create_task(self.leadership.run())
        try:
            won = await _first(self.leadership.won.wait(), stopping.wait(), server, contending)
            if won or await self._is_last(server, contending):
                await self._lead(app, stopping, server, contending)
        finally:
            server.cancel()
            await asyncio.wait({server})
            sock.close()
            contending.cancel()
            await asyncio.wait({contending})
            await self.leadership.release()

    async def _lead(
        self, app: ElectedControllerApp, stopping: asyncio.Event, *others: asyncio.Task[None]
    ) -> None:
        term = self.leadership.term
        if not self.leadership.leads():
            # The process was paused since it won: the term may be that of its successor.
            raise NotLeader(f"this controller does not lead any more, in term {term}")
        state = self.state_of(term)
        state.claim()
        async with passed(self.fence, term):
            # Only now: what an order of the leader before has changed is in the state.
            own = self.actuator_of(state)
        parts = parts_of(
            own, state, term, lambda inner: FencedActuator(inner, term, self.leadership.leads, self.fence)
        )
        app.whole = build_app(parts.controller, self.secret)
        log.info("leads in term %d", term)
        tasks = parts.start()
        try:
            await _first(stopping.wait(), *tasks, *others)
        finally:
            app.whole = None
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if await self._stands_alone():
            # As the end of a controller that is no candidate: nobody would answer for the replicas.
            await parts.actuator.stop()
        await parts.actuator.close()

    async def _is_last(self, *others: asyncio.Task[None]) -> bool:
        """Whether this controller, which stood by and ends, is to end the replicas of the last leader.

        It is if no other controller stays, and the leader did not do so when it released the lease, or died.
        """
        if not await self._stands_alone():
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(self.leadership.lease_s + LAST_S):
                return await _first(self.leadership.won.wait(), *others)
        return False

    async def _stands_alone(self) -> bool:
        """Whether no other controller stays; one address of several controllers says nothing of that."""
        if "," not in self.addresses:
            return False
        async with httpx.AsyncClient(
            headers={SECRET_HEADER: self.secret}, timeout=ASK_S, trust_env=False
        ) as client:
            for address in Controllers(self.addresses).all:
                try:
                    answer = await client.get(f"http://{address}{LEADER}")
                    found = msgspec.json.decode(answer.content, type=LeaderStatus)
                    if found.address != self.address and not found.ending:
                        return False
                except (httpx.HTTPError, msgspec.MsgspecError):
                    continue
        return True


async def _first(*works: Awaitable[object]) -> bool:
    """Wait for the first of ``works`` to end, and raise its error; whether it is the first in the list."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, work in zip(tasks, works, strict=True):
            # Those that were made here.
            if task is not work:
                task.cancel()
    for task in done:
        task.result()
    return tasks[0] in done
