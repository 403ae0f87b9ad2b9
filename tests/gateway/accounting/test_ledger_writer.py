"""The ledger has each request once, whichever process is killed at whatever step."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import Connection, func, select

from gateway.accounting.ledger_writer import LedgerWriter
from gateway.intake.usage_journal import UsageCharge, UsageJournal
from gateway.protocol.usage import TokenUsage
from gateway.telemetry.structured_log import StructuredLog
from policy.config.tenancy import TokenPrice
from policy.errors import Unreachable
from policy.tenancy.price import rates_of
from store.database import Database
from store.tenancy import ledger, spending
from store.tenancy.spending import SpendBudget
from store.tenancy.tables import ledger_segments

RATES = rates_of(TokenPrice(input=2.0, cached_input=0.5, output=8.0))
ESTIMATE = 10
FAULTS = ("none", "away", "lost before the commit", "lost after the commit")
tokens = st.integers(0, 50)


class KilledError(Exception):
    """A process ends here."""


class Fuse:
    """The words of a segment; the process is killed before one more is written than it has ``left``."""

    def __init__(self, words: Any) -> None:
        self.words = words
        self.left = -1

    def __setitem__(self, at: int, value: int) -> None:
        if self.left == 0:
            raise KilledError
        self.left -= 1
        self.words[at] = value


class FaultyDatabase:
    """Transactions that fail as ``faults`` says, one after the other."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.faults: list[str] = []

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        fault = self.faults.pop(0) if self.faults else "none"
        if fault == "away":
            raise Unreachable(fault)
        with self._database.writing() as connection:
            yield connection
            if fault == "lost before the commit":
                raise Unreachable(fault)
        if fault == "lost after the commit":
            raise Unreachable(fault)

    def rows(self) -> dict[str, dict[str, Any]]:
        with self._database.reading() as connection:
            rows = ledger.usage(connection, ("key_id", "tenant", "model", "adapter"))
        return {row["key_id"]: row for row in rows}

    def segments(self) -> int:
        with self._database.reading() as connection:
            return int(connection.execute(select(func.count()).select_from(ledger_segments)).scalar_one())


@dataclass(eq=False)
class Stream:
    """A charge, the events of it that are relayed, and those of them that the engine's last report counts."""

    charge: UsageCharge
    events: int = 0
    reported: int = 0

    def counts(self) -> tuple[int, int, int]:
        """What is charged if the worker is killed now."""
        charge = self.charge
        return charge.prompt, charge.cached, charge.output + self.events - self.reported


def journal(directory: Path, slots: int = 3) -> UsageJournal:
    return UsageJournal(directory, StructuredLog(0, StringIO()), slots)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("empty") / "t.db"
    Database(f"sqlite:///{path}").close()
    return path


class Ledger(RuleBasedStateMachine):
    """Two workers and an accounting process. ``allowed`` are the counts that each request's row may have."""

    template: Path

    @initialize()
    def begin(self) -> None:
        self.root = Path(mkdtemp(dir=self.template.parent))
        shutil.copy(self.template, self.root / "t.db")
        self.database = FaultyDatabase(Database(f"sqlite:///{self.root / 't.db'}"))
        self.workers = [journal(self.root / "usage") for _ in range(2)]
        self.writer = self.new_writer()
        self.streams: list[list[Stream]] = [[], []]
        self.allowed: dict[str, set[tuple[int, int, int, bool, bool]]] = {}
        self.number = 0

    def new_writer(self) -> LedgerWriter:
        return LedgerWriter(
            lambda: self.database,
            self.root / "usage",
            "host",
            batch_slots=3,
            max_open=2,  # type: ignore[arg-type, return-value]
        )

    def allow(
        self, charge: UsageCharge, counts: tuple[int, int, int], *, estimated: bool, interrupted: bool
    ) -> None:
        self.allowed.setdefault(charge.key, set()).add((*counts, estimated, interrupted))

    def end(self, worker: int, stream: Stream, usage: TokenUsage | None) -> None:
        """End a stream; what it has counted is allowed."""
        charge, counts = stream.charge, stream.counts()
        stream.reported = stream.events
        charge.end(usage)
        if usage is not None:
            counts = charge.prompt, charge.cached, charge.output
        assert charge.estimated is (usage is None or not usage.exact)
        self.allow(charge, counts, estimated=charge.estimated, interrupted=False)
        self.streams[worker].remove(stream)

    @contextmanager
    def fused(self, worker: int, stream: Stream, left: int) -> Iterator[None]:
        """The worker is killed after ``left`` more words; what it counted before and after is allowed."""
        charge = stream.charge
        segment = charge.segment
        if segment is None or not 0 <= left < 4:
            yield
            return
        before = stream.counts()
        fuse = Fuse(charge.words)
        fuse.left = left
        charge.words = fuse  # type: ignore[assignment]
        try:
            yield
        except KilledError:
            after = stream.counts()
            for counts in (before, after, (*after[:2], before[2]), (*before[:2], after[2])):
                self.allow(charge, counts, estimated=True, interrupted=True)
            self.streams[worker].remove(stream)
            segment.close()
            self.kill(worker)
        else:
            if charge.words is fuse:
                charge.words = fuse.words

    def kill(self, worker: int) -> None:
        for stream in self.streams[worker]:
            self.allow(stream.charge, stream.counts(), estimated=True, interrupted=True)
            if (segment := stream.charge.segment) is not None:
                segment.close()
        self.workers[worker].close()
        self.streams[worker] = []
        self.workers[worker] = journal(self.root / "usage")

    @rule(worker=st.integers(0, 1))
    def a_request_is_committed(self, worker: int) -> None:
        self.number += 1
        charge = UsageCharge(self.workers[worker], "t", f"k{self.number}", "m", "", RATES, ESTIMATE)
        charge.begin()
        self.streams[worker].append(Stream(charge))

    @rule(worker=st.integers(0, 1), which=st.integers(0, 9), events=st.integers(1, 9), left=st.integers(0, 9))
    def events_are_relayed(self, worker: int, which: int, events: int, left: int) -> None:
        if self.streams[worker]:
            stream = self.streams[worker][which % len(self.streams[worker])]
            with self.fused(worker, stream, left):
                stream.events += events
                stream.charge.relay(stream.events)

    @rule(
        worker=st.integers(0, 1), which=st.integers(0, 9), usage=st.tuples(tokens, tokens, tokens),
        final=st.booleans(), exact=st.booleans(), left=st.integers(0, 9), late=st.integers(0, 2),
    )  # fmt: skip
    def an_engine_reports(  # noqa: PLR0917 - what hypothesis draws
        self,
        worker: int,
        which: int,
        usage: tuple[int, int, int],
        final: bool,
        exact: bool,
        left: int,
        late: int,
    ) -> None:
        if not self.streams[worker]:
            return
        stream = self.streams[worker][which % len(self.streams[worker])]
        with self.fused(worker, stream, left):
            if final:
                self.end(worker, stream, TokenUsage(*usage, exact=exact))
            else:
                stream.reported = max(0, stream.events - late)
                stream.charge.report(TokenUsage(*usage), stream.reported)

    @rule(worker=st.integers(0, 1), which=st.integers(0, 9), left=st.integers(0, 9))
    def a_client_leaves(self, worker: int, which: int, left: int) -> None:
        if self.streams[worker]:
            stream = self.streams[worker][which % len(self.streams[worker])]
            with self.fused(worker, stream, left):
                self.end(worker, stream, None)

    @rule(worker=st.integers(0, 1))
    def a_worker_is_killed(self, worker: int) -> None:
        self.kill(worker)

    @rule(worker=st.integers(0, 1))
    def a_segment_is_made_ahead(self, worker: int) -> None:
        self.workers[worker].prepare()

    @rule(faults=st.lists(st.sampled_from(FAULTS), max_size=3), killed=st.booleans())
    def the_journal_is_drained(self, faults: list[str], killed: bool) -> None:
        self.database.faults = list(faults)
        try:
            self.writer.drain()
        except Unreachable:
            if killed:
                self.writer.close()
                self.writer = self.new_writer()
        self.database.faults = []

    @precondition(lambda self: self.number)
    @invariant()
    def nothing_is_added_twice_or_wrongly(self) -> None:
        for key, row in self.database.rows().items():
            counts = row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]
            flags = bool(row["estimated"]), bool(row["interrupted"])
            assert row["requests"] == 1
            assert (*counts, *flags) in self.allowed[key]
            assert row["cost_nano"] == RATES.cost(*counts)

    def teardown(self) -> None:
        if not hasattr(self, "root"):
            return
        for worker in range(2):
            self.kill(worker)
            self.workers[worker].close()
        for _ in range(10):  # only two segments are open at a time
            self.writer.drain()
        assert set(self.database.rows()) == {f"k{n}" for n in range(1, self.number + 1)}, "each is there"
        self.nothing_is_added_twice_or_wrongly()
        assert list((self.root / "usage").glob("*.usage")) == []
        assert self.database.segments() == 0
        self.writer.close()
        shutil.rmtree(self.root)


@pytest.mark.slow
def test_any_order_of_requests_kills_and_faults(empty: Path) -> None:
    Ledger.template = empty
    from hypothesis.stateful import run_state_machine_as_test  # noqa: PLC0415

    run_state_machine_as_test(Ledger, settings=settings(max_examples=60, stateful_step_count=40))


def test_a_budget_has_what_was_spent_in_its_period(tmp_path: Path, database_url: str) -> None:
    """By all hosts, and also before it was set, but for periods that are no whole days."""
    database = Database(database_url)
    now = int(time.time())
    today = now // 86_400 * 86_400
    whole_days = [SpendBudget("t", False, "7d", today), SpendBudget("k1", True, "", 0)]
    minutes, next_week = (
        SpendBudget("t", False, "90s", now // 2 * 2 - 1),
        SpendBudget("t", False, "7d", now + 86_400),
    )
    budgets: list[SpendBudget] = []
    hosts = [
        (
            journal(tmp_path / name),
            LedgerWriter(lambda: database, tmp_path / name, name, lambda *_: iter(budgets)),
        )
        for name in ("a", "b")
    ]

    def spend(host: int, tokens: int) -> None:
        workers, writer = hosts[host]
        charge = UsageCharge(workers, "t", "k1", "m", "", RATES, 0)
        charge.begin()
        charge.end(TokenUsage(0, 0, tokens))
        writer.drain()

    def spent() -> dict[SpendBudget, int]:
        with database.reading() as connection:
            return spending.read(connection, [*whole_days, minutes, next_week])

    spend(0, 1)
    budgets = [*whole_days, minutes]
    spend(1, 10)
    spend(0, 100)
    assert spent() == dict.fromkeys(whole_days, 111 * 8000) | {minutes: 110 * 8000}
    with database.writing() as connection:
        spending.note(connection, [next_week])
    assert spent()[next_week] == 0, "a new period begins with nothing"
    budgets = [next_week]
    spend(1, 5)
    assert spent()[next_week] == 5 * 8000
    database.close()


def test_what_a_power_failure_destroyed_holds_nothing_up(tmp_path: Path) -> None:
    """A file that is no segment is set aside, and a request whose tenant is lost is counted."""
    database = Database(f"sqlite:///{tmp_path / 't.db'}")
    folder = tmp_path / "usage"
    workers = [journal(folder) for _ in range(2)]
    for number, worker in enumerate(workers):
        charge = UsageCharge(worker, f"t{number}", "k", "m", "", RATES, 0)
        charge.begin()
        charge.end(TokenUsage(1, 0, 1))
        worker.close()
    destroyed = min(folder.glob("*.usage"), key=lambda path: b'"t0"' in path.read_bytes())
    kept = destroyed.read_bytes().partition(b'{"tenant"')[0]
    destroyed.write_bytes(kept + bytes(64 * 1024))
    (folder / "garbage.usage").write_bytes(b"x" * 100)
    os.utime(folder / "garbage.usage", (1.0, 1.0))
    (folder / "new.usage").write_bytes(b"")
    writer = LedgerWriter(lambda: database, folder, "host")
    writer.drain()
    with database.reading() as connection:
        assert [row["tenant"] for row in ledger.usage(connection, ["tenant"])] == ["t0"]
    assert writer.status().lost == 1
    left = sorted(path.name for path in folder.iterdir() if path.suffix)
    assert left == ["garbage.unreadable", "new.usage"]
    writer.close()
    database.close()
