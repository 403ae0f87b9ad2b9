"""The decision journal: situations, decisions and outcomes of switches, one JSON object per line.

A round has its memories, so it can be decided again, bit for bit. Most rounds change nothing: of those that
are like the last one only one a minute is written.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import threading
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from pathlib import Path

import msgspec

from policy.config.control import Choice
from policy.config.deployment import ResourceBudget
from policy.scaling.decision_types import Decision, DecisionMemory, Situation
from serve.controller_api_schema import LoggedDecision, SwitchOutcome
from store.log_file import KEPT, MAX_BYTES, RotatingLog

log = logging.getLogger("tidegate.controller")

EVERY_S = 60.0
# Lines kept in memory while the disk takes none.
MAX_PENDING = 1024
_at = attrgetter("decision.at")
# Read at once: reading a whole file would delay the event loop.
BLOCK_BYTES = 256 * 1024


class JournaledPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """The configured policies, and by name the others that were evaluated for comparison."""

    live: Choice
    shadow: Choice | None = None
    others: tuple[str, ...] = ()


class DecisionRound(msgspec.Struct, frozen=True, kw_only=True, tag="round"):
    """What was decided together at ``at``: by which policies, of which situations, within which budget."""

    at: float
    policies: dict[str, JournaledPolicies]
    situations: dict[str, Situation]
    budget: ResourceBudget
    decisions: dict[str, Decision] = {}


Line = DecisionRound | SwitchOutcome
_decode = msgspec.json.Decoder(Line).decode
# The former names of fields, by which older journals are read; all their rounds have the first.
_FORMER_NAMES = {
    "rungs": "mode_options",
    "overflow": "spillover",
    "clips": "applied_guardrails",
    "outlooks": "mode_forecasts",
}
_FORMER_FIELD = b'"rungs":'


class DecisionJournal:
    """Appends to a file that is rotated by size, in a thread that ends when there is nothing to write.

    It is rotated at ``max_bytes``, and read ``block_bytes`` at once.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, block_bytes: int = BLOCK_BYTES) -> None:
        self._path = path
        self._max_bytes, self._block_bytes = max_bytes, block_bytes
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._writer: threading.Thread | None = None
        self._written: dict[str, tuple[object, float]] = {}
        self._skipped: dict[str, LoggedDecision] = {}
        self._lost = 0

    def put(self, line: Line) -> None:
        """Append a line, unless it is a round without news; never waits for the disk."""
        if isinstance(line, DecisionRound) and not self._is_new(line):
            return
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                self._lost += 1
                return
            self._pending.append(msgspec.json.encode(line) + b"\n")
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="journal", daemon=True)
                self._writer.start()

    def read(self, last: int, at: float | None = None, model: str | None = None) -> list[LoggedDecision]:
        """The ``last`` decisions (of ``model``, up to ``at``), newest first. Not for an event loop."""
        self.flush()
        newest = [
            each
            for name, each in self._skipped.copy().items()
            if model in (None, name) and (at is None or each.decision.at <= at)
        ]
        newest.sort(key=_at, reverse=True)
        return list(islice(heapq.merge(newest, self._read_files(at, model), key=_at, reverse=True), last))

    def _read_files(self, at: float | None, model: str | None) -> Iterator[LoggedDecision]:
        # The outcome of a decision is written after it, so it is read first.
        outcomes: dict[tuple[str, float], SwitchOutcome] = {}
        for line in self.lines():
            if isinstance(line, SwitchOutcome):
                outcomes[line.model, line.decided_at] = line
            elif at is None or line.at <= at:
                for name, decision in line.decisions.items():
                    if model in (None, name):
                        yield LoggedDecision(
                            situation=without_memory(line.situations[name]),
                            decision=decision,
                            outcome=outcomes.pop((name, decision.at), None),
                        )

    def lines(self) -> Iterator[Line]:
        """All lines on disk, newest first, without incomplete ones and those of another version."""
        paths = [self._path, *(self._path.with_name(f"{self._path.name}.{i}") for i in range(1, KEPT + 1))]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                for raw in _backwards(path, self._block_bytes):
                    with contextlib.suppress(msgspec.MsgspecError):
                        yield _decode_former(raw) if _FORMER_FIELD in raw else _decode(raw)

    def forget(self, model: str) -> None:
        """Forget unwritten decisions of ``model``, which was removed."""
        self._written.pop(model, None)
        self._skipped.pop(model, None)

    def flush(self) -> None:
        """Return once all lines so far are on disk."""
        if (writer := self._writer) is not None:
            writer.join()

    def _is_new(self, made: DecisionRound) -> bool:
        new = False
        for name, decision in made.decisions.items():
            written, at = self._written.get(name, (None, 0.0))
            new |= decision.changes or _gist(decision) != written or abs(made.at - at) >= EVERY_S
        for name, decision in made.decisions.items():
            if new:
                self._written[name] = (_gist(decision), made.at)
                self._skipped.pop(name, None)
            else:
                situation = without_memory(made.situations[name])
                self._skipped[name] = LoggedDecision(situation=situation, decision=decision)
        return new

    def _write(self) -> None:
        while True:
            with self._lock:
                lines, self._pending = self._pending, []
                if not lines:
                    self._writer = None
                    return
                lost, self._lost = self._lost, 0
            try:
                with contextlib.closing(RotatingLog(self._path, self._max_bytes)) as file:
                    if not _ends_a_line(self._path):
                        file.write(b"\n")
                    for line in lines:
                        file.write(line)
            except OSError as error:
                lost += len(lines)
                log.warning("%s: %s", self._path, error)
            if lost:
                log.warning("%d decisions are not in the log", lost)


def without_memory(situation: Situation) -> Situation:
    """The situation without its memory, which only policies read."""
    return msgspec.structs.replace(situation, memory=DecisionMemory())


def _decode_former(raw: bytes) -> Line:
    """A line that may have fields by their former names."""
    line = msgspec.json.decode(raw)
    for each in (*line.get("situations", {}).values(), *line.get("decisions", {}).values()):
        for former in each.keys() & _FORMER_NAMES.keys():
            each[_FORMER_NAMES[former]] = each.pop(former)
    made: Line = msgspec.convert(line, Line, str_keys=True)
    return made


def _gist(decision: Decision) -> object:
    """The parts of a decision whose change is worth a line in the journal."""
    shadow = decision.shadow.count if decision.shadow is not None else None
    applied = tuple((each.rule, each.now) for each in decision.applied_guardrails)
    return decision.mode, decision.count, decision.proposal.count, applied, shadow, decision.dry_run


def _backwards(path: Path, block_bytes: int) -> Iterator[bytes]:
    """The lines of a file, last first."""
    with path.open("rb") as file:
        left, rest = file.seek(0, 2), b""
        while left:
            size = min(block_bytes, left)
            left -= size
            file.seek(left)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
        yield rest


def _ends_a_line(path: Path) -> bool:
    """Whether the last line is complete."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
