"""The log of decisions: what is written, what is read, and that a replay decides the same bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.config.deployment import ResourceBudget
from policy.scaling.decision_types import DecisionMemory
from serve.autoscaler.decision_journal import DecisionJournal, DecisionRound, JournaledPolicies, Line
from serve.autoscaler.policies import policies_for
from store import log_file
from tests.policy.control_play import replayed
from tests.serve.plane import Plane
from tests.serve.sim_documents import document, sim_model
from tests.serve.traffic import Traffic, by_rate
from tests.tidegate.decisions import decision, situation


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


@pytest.fixture
def log(path: Path) -> DecisionJournal:
    return DecisionJournal(path)


def made(at: float, count: int = 4, model: str = "sim", **over: Any) -> DecisionRound:
    decided = decision(at=at, model=model, count=count, was_count=count, applied_guardrails=(), **over)
    remembered = situation(at=at, model=model, memory=DecisionMemory(policy={"level": at}))
    return DecisionRound(
        at=at,
        policies={model: JournaledPolicies(live="static")},
        situations={model: remembered},
        budget=ResourceBudget(),
        decisions={model: decided},
    )


def written(log: DecisionJournal) -> list[float]:
    log.flush()
    return [line.at for line in log.lines()]


def test_unchanged_rounds_are_written_once_a_minute(log: DecisionJournal) -> None:
    for second in range(0, 130, 5):
        log.put(made(1000.0 + second))
    assert written(log) == [1120.0, 1060.0, 1000.0]


def test_changes_are_written_at_once(log: DecisionJournal) -> None:
    log.put(made(1000.0))
    log.put(made(1005.0))
    log.put(made(1010.0, count=5))
    log.put(made(1015.0, count=5))
    log.put(made(1020.0, count=5, shadow=None))
    log.put(made(1025.0, count=5, shadow=None, dry_run=True))
    assert written(log) == [1025.0, 1020.0, 1010.0, 1000.0]
    changing = msgspec.structs.replace(made(1030.0), decisions={"sim": decision(at=1030.0)})
    log.put(changing)
    log.put(msgspec.structs.replace(changing, at=1035.0))
    assert written(log)[:2] == [1035.0, 1030.0]


def test_policy_memory_is_written_and_skipped_by_readers(log: DecisionJournal) -> None:
    log.put(made(1000.0))
    (line,) = _lines(log)
    assert isinstance(line, DecisionRound)
    assert line.situations["sim"].memory.policy == {"level": 1000.0}
    (seen,) = log.read(last=5)
    assert seen.situation.memory == DecisionMemory()
    assert seen.decision == line.decisions["sim"]


def test_read_back_from_now_or_an_instant(log: DecisionJournal) -> None:
    for second in (0, 70, 140):
        log.put(made(1000.0 + second))
        log.put(made(1001.0 + second, model="other"))
    log.put(made(1145.0))
    assert [each.decision.at for each in log.read(last=2, model="sim")] == [1145.0, 1140.0]
    assert [each.decision.at for each in log.read(last=9, at=1100.0, model="sim")] == [1070.0, 1000.0]
    assert [each.decision.at for each in log.read(last=9, at=1000.0)] == [1000.0]
    assert [each.decision.model for each in log.read(last=2, at=1071.0)] == ["other", "sim"]
    assert log.read(last=3, model="none") == []


def test_unwritten_decisions_are_read_in_order(log: DecisionJournal) -> None:
    log.put(made(1000.0))
    log.put(made(1005.0))
    log.put(made(1010.0, model="other"))
    assert [each.decision.at for each in log.read(last=9)] == [1010.0, 1005.0, 1000.0]
    assert [each.decision.model for each in log.read(last=1)] == ["other"]


@pytest.mark.parametrize("block", [1, 7, 100_000])
def test_the_log_is_read_from_its_end(path: Path, block: int) -> None:
    log = DecisionJournal(path, block_bytes=block)
    path.write_bytes(b'{"half\n' + b"".join(msgspec.json.encode(made(float(i))) + b"\n" for i in (1, 2)))
    assert [line.at for line in _lines(log)] == [2.0, 1.0]
    with path.open("ab") as file:
        file.write(b'{"type":"rou')
    assert [line.at for line in _lines(log)] == [2.0, 1.0]


def test_files_are_rotated_and_read_across(path: Path) -> None:
    size = len(msgspec.json.encode(made(1000.0))) + 1
    log = DecisionJournal(path, max_bytes=3 * size)
    for i in range(40):
        log.put(made(1000.0 + i, count=i % 2))
        log.flush()
    files = list(path.parent.iterdir())
    assert len(files) == 1 + log_file.KEPT
    assert all(file.stat().st_size <= 3 * size + 30 for file in files)
    assert [each.decision.at for each in log.read(last=5)] == [1039.0, 1038.0, 1037.0, 1036.0, 1035.0]


def test_an_incomplete_last_line_is_skipped(path: Path, log: DecisionJournal) -> None:
    log.put(made(1000.0))
    log.flush()
    with path.open("ab") as file:
        file.write(b'{"type":"round","at":10')
    again = DecisionJournal(path)
    again.put(made(1100.0))
    assert written(again) == [1100.0, 1000.0]


def test_an_unwritable_disk_stops_no_decision(tmp_path: Path) -> None:
    log = DecisionJournal(tmp_path / "file" / "decisions.jsonl")
    (tmp_path / "file").write_text("in the way")
    log.put(made(1000.0))
    log.flush()
    (tmp_path / "file").unlink()
    log.put(made(1100.0))
    assert written(log) == [1100.0]


@pytest.mark.slow
async def test_journal_replays_bit_for_bit(plane: Plane, tmp_path: Path) -> None:
    control = {"tick_s": 1, "scale": {"hold_s": 5}, "guard": {"stale_s": 5}}
    models = [
        sim_model("a", control=control | {"policy": by_rate(tmp_path), "shadow": "predictive"}),
        sim_model("b", control=control),
    ]
    traffic = await Traffic.over(plane, document(*models, budget={"cpus": 6}), 10, a=1.0, b=50.0)
    await traffic.run(20, a=4.0)
    traffic.silent = True
    await traffic.run(10)
    traffic.silent = False
    await traffic.run(40, a=1.0)
    lines = [line for line in _lines(plane.controller.autoscaler.journal) if isinstance(line, DecisionRound)]
    assert len(lines) > 5
    assert any(decision.changes for line in lines for decision in line.decisions.values())
    for line in lines:
        by_model = {name: policies_for(name, chosen, print) for name, chosen in line.policies.items()}
        again = replayed(line.situations, line.budget, by_model)
        assert msgspec.json.encode(again) == msgspec.json.encode(line.decisions)


def _lines(log: DecisionJournal) -> list[Line]:
    log.flush()
    return list(log.lines())
