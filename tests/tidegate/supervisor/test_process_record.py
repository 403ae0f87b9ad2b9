"""The record of started processes survives its writer, and only recorded processes are ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from store.state_dir import StateDir
from tidegate.supervisor.process_record import ProcessRecord, RecordedProcess

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def processes() -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    pair = (subprocess.Popen(SLEEP), subprocess.Popen(SLEEP))
    yield pair
    for process in pair:
        process.kill()
        process.wait()


Pair = tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]


def test_a_process_with_a_recycled_pid_is_not_ended(tmp_path: Path, processes: Pair) -> None:
    started = psutil.Process(processes[0].pid).create_time()
    earlier = RecordedProcess(name="sleeper", pid=processes[0].pid, created=started - 3600)
    ended: list[RecordedProcess] = []
    assert ProcessRecord(StateDir(tmp_path)).end([earlier], ended.append) == ()
    assert ended == []
    assert processes[0].poll() is None


def test_a_snapshot_records_descendants_and_drops_ended_processes(tmp_path: Path, processes: Pair) -> None:
    state = StateDir(tmp_path)
    record = ProcessRecord(state)
    first, second = processes
    record.started.update((first.pid, second.pid))
    record.snapshot()
    assert {first.pid, second.pid} <= set(ProcessRecord(state).entries)
    first.kill()
    first.wait()
    record.snapshot()
    assert first.pid not in set(ProcessRecord(state).entries)


def test_a_process_is_ended_by_its_record_after_the_clock_was_set(tmp_path: Path, processes: Pair) -> None:
    state = StateDir(tmp_path)
    record = ProcessRecord(state)
    record.add("sleeper", processes[0].pid)
    record.started.add(processes[1].pid)
    record.snapshot()
    moved = [replace(entry, created=entry.created - 3600) for entry in record.entries.values()]
    state.save(state.processes_path, moved)
    pids = {process.pid for process in processes}
    entries = [entry for entry in ProcessRecord(state).living() if entry.pid in pids]
    assert {entry.pid for entry in entries} == pids
    assert ProcessRecord(state).end(entries, lambda entry: None) == ()
    assert [process.wait() for process in processes] == [-15, -15]


def test_a_snapshot_that_a_full_disk_refuses_is_written_later(tmp_path: Path, processes: Pair) -> None:
    state = StateDir(tmp_path)
    record = ProcessRecord(state)
    pids = {process.pid for process in processes}
    record.started.update(pids)
    state.processes_path.mkdir()
    record.snapshot()
    # What must end is known.
    assert pids <= {entry.pid for entry in record.living()}
    state.processes_path.rmdir()
    record.snapshot()
    assert pids <= set(ProcessRecord(state).entries)
