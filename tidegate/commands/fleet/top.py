"""``top``: models, replicas and decisions of a deployment, live in a terminal."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence

import click
from rich.live import Live
from rich.text import Text

from policy.errors import TargetError, Unreachable
from serve.autoscaler.decision_history import ModelHistory
from serve.controller.client import ControllerClient
from serve.controller_api_schema import LoggedDecision
from store.state_dir import StateDir
from tidegate.commands.deployment_context import controller_client
from tidegate.commands.fleet.status import gather
from tidegate.commands.fleet.top_view import TopData, render_top
from tidegate.commands.terminal import console, warn
from tidegate.exit_codes import ExitCode

_PERIOD_S = 1.0
# Decisions that are searched for changes at the start, and changes that are kept.
_SEARCHED, _KEPT = 200, 50
# How long ago the curves begin, the seconds of one of their points, and how often they are read.
_HISTORY_S, _POINT_S, _READ_EVERY_S = 600.0, 30.0, 10.0
# More than can be made between two looks.
_RECENT = 5
_QUIT = "q"


class FleetWatcher:
    """Reads the deployment of a state directory again and again; keeps the changes that it saw."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._client: ControllerClient | None = None
        self._changes: dict[tuple[str, float], LoggedDecision] | None = None
        self._arrivals: dict[str, Sequence[float | None]] = {}
        self._history_at = 0.0

    def read(self, at: float) -> TopData:
        """The state now; what does not answer is left out."""
        status = gather(self._state, at)
        data = TopData(status=status)
        if status.supervisor is None:
            self._client = self._changes = None
            return data
        with contextlib.suppress(Unreachable, TargetError):
            client = self._client = self._client or controller_client(self._state)
            if self._changes is None:
                self._changes = {}
                self._keep(client.decisions(last=_SEARCHED))
            recent = [found for model in status.models if (found := self._recent(client, model.name))]
            for found in recent:
                self._keep(found)
            if at - self._history_at >= _READ_EVERY_S:
                self._arrivals = {
                    each.model: _arrivals(each, at) for each in client.history(at - _HISTORY_S, _POINT_S)
                }
                self._history_at = at
            return TopData(
                status=status,
                arrivals=self._arrivals,
                latest={found[0].decision.model: found[0] for found in recent},
                changes=tuple(self._changes.values()),
                gpus=client.gpus(),
            )
        return data

    @staticmethod
    def _recent(client: ControllerClient, model: str) -> tuple[LoggedDecision, ...]:
        with contextlib.suppress(TargetError):  # an external model
            return client.decisions(model, last=_RECENT)
        return ()

    def _keep(self, decisions: tuple[LoggedDecision, ...]) -> None:
        known = self._changes or {}
        for each in decisions:
            if each.decision.changes:
                known[each.decision.model, each.decision.at] = each
        newest = sorted(known.items(), key=lambda item: item[0][1], reverse=True)
        self._changes = dict(newest[:_KEPT])


def _arrivals(history: ModelHistory, at: float) -> list[float | None]:
    """The arrivals a second at each point of the last ``_HISTORY_S`` seconds; ``None`` where not known."""
    known = dict(
        zip((int(began // _POINT_S) for began in history.at), history.columns["arrivals_per_s"], strict=True)
    )
    last = int(at // _POINT_S)
    return [known.get(point) for point in range(last - int(_HISTORY_S // _POINT_S) + 1, last + 1)]


@click.command(
    help="Show models, replicas and the last changes of the running deployment, once a second. q or Ctrl-C"
    " ends it.\n\nLatencies are the 95th percentiles of the last minute beside the SLO; goodput is the"
    " fraction of requests that met it. In a wide terminal the load of the last ten minutes is a curve, from"
    " the controller's history."
)
@click.option("--once", is_flag=True, help="Print the state once, also without a terminal.")
@click.pass_obj
def top(state: StateDir, once: bool) -> None:
    watcher = FleetWatcher(state)
    data = watcher.read(time.time())
    if data.status.supervisor is None:
        warn(data.nothing_runs)
        sys.exit(ExitCode.NOT_RUNNING)
    out = console()
    if once or not sys.stdout.isatty():
        out.print(render_top(data, out.width))
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys(),
        Live(console=out, screen=True, auto_refresh=False) as live,
    ):
        while True:
            size = out.size
            shown = (
                render_top(data, size.width, size.height)
                if data.status.supervisor
                else Text(data.nothing_runs)
            )
            live.update(shown, refresh=True)
            if pressed(_QUIT, _PERIOD_S):
                return
            data = watcher.read(time.time())


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Keys are read one by one and not shown, where standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def pressed(key: str, within_s: float) -> bool:
    """Whether ``key`` is pressed ``within_s`` seconds, which pass otherwise."""
    if not sys.stdin.isatty():
        time.sleep(within_s)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return bool(ready) and sys.stdin.read(1) == key
