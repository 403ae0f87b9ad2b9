"""``tidegate apply --watch``: each save is applied, and an invalid one changes nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from policy.errors import SwitchRefused, TidegateError
from tests.tidegate.conftest import Site, until
from tidegate.cli import group
from tidegate.commands.deployment import check_and_apply
from tidegate.commands.deployment.check_and_apply import POLL_S, file_changes

Edit = Callable[[], object]


class FakeSupervisor:
    """A supervisor that accepts every deployment file, or raises ``refuses``."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.refuses: TidegateError | None = None
        self.applied: list[Any] = []

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(document=self.document)

    def apply(self, document: dict[str, Any]) -> None:
        self.applied.append(document)
        if self.refuses is not None:
            raise self.refuses
        self.document = document


def document(timeout_s: float, **more: object) -> dict[str, Any]:
    model = {"name": "e", "engine": "external", "urls": ["http://127.0.0.1:1"]}
    return {"models": [model], "gateway": {"queue_timeout_s": timeout_s, **more}}


class WatchedFile:
    """A file that is edited while the command watches it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "deployment.yaml"
        self.running = FakeSupervisor(document(1))
        self.write(document(1))
        self._edits: list[Edit] = []
        monkeypatch.setattr(check_and_apply, "SupervisorClient", lambda state: self.running)
        monkeypatch.setattr(check_and_apply, "file_changes", self._saves)

    def write(self, content: object) -> None:
        self.file.write_text(content if isinstance(content, str) else json.dumps(content))

    def watch(self, *edits: Edit, options: tuple[str, ...] = ()) -> Result:
        self._edits = list(edits)
        return CliRunner().invoke(group, ["apply", str(self.file), "--watch", *options])

    def _saves(self, path: Path) -> Iterator[None]:
        assert path == self.file
        yield
        for edit in self._edits:
            edit()
            yield
        raise KeyboardInterrupt

    @property
    def timeout_s(self) -> float:
        value: float = self.running.document["gateway"]["queue_timeout_s"]
        return value


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedFile:
    return WatchedFile(tmp_path, monkeypatch)


def test_each_save_is_shown_and_applied(watched: WatchedFile) -> None:
    done = watched.watch(lambda: watched.write(document(2)), lambda: watched.write(document(3)))
    assert done.exit_code == 0, done.output
    assert [applied["gateway"]["queue_timeout_s"] for applied in watched.running.applied] == [1, 2, 3]
    shown = [line.split()[:3] for line in done.output.splitlines() if "gateway." in line]
    assert shown == [["gateway.queue_timeout_s", "1.0", "2.0"], ["gateway.queue_timeout_s", "2.0", "3.0"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("models: [", "valid YAML"),
        (document(9, worker=3), "gateway.worker"),
        (document(9, port=1234), "down and up"),
        (document(-1), "gateway.queue_timeout_s"),
    ],
    ids=["no YAML", "no such key", "a new port", "out of range"],
)
def test_an_invalid_save_is_refused(watched: WatchedFile, content: object, message: str) -> None:
    def now_good() -> None:
        assert watched.timeout_s == 1, "the bad one is not in force"
        watched.write(document(4))

    done = watched.watch(lambda: watched.write(content), now_good)
    assert done.exit_code == 0, done.output
    assert message in done.stderr
    assert "The running deployment is unchanged." in done.stderr
    assert watched.timeout_s == 4


def test_watch_continues_after_a_refusal_by_the_controller(watched: WatchedFile) -> None:
    def refused() -> None:
        watched.write(document(5))
        watched.running.refuses = SwitchRefused("the queue cannot hold it")

    def taken() -> None:
        watched.write(document(6))
        watched.running.refuses = None

    done = watched.watch(refused, taken)
    assert "the queue cannot hold it" in done.stderr
    assert watched.timeout_s == 6


def test_dry_run_only_shows(watched: WatchedFile) -> None:
    done = watched.watch(lambda: watched.write(document(7)), options=("--dry-run", "--json"))
    assert watched.running.applied == []
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["applied"] for line in lines] == [False, False]
    assert [change["after"] for line in lines for change in line["changes"]] == [7.0]


class ScriptedSleep:
    """Makes one edit at each poll, or none."""

    def __init__(self, *edits: Edit | None) -> None:
        self._edits = iter(edits)

    def sleep(self, seconds: float) -> None:
        assert seconds == POLL_S
        try:
            edit = next(self._edits)
        except StopIteration:
            raise KeyboardInterrupt from None
        if edit is not None:
            edit()


def reports(path: Path, *edits: Edit | None) -> int:
    reported = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in file_changes(path, ScriptedSleep(*edits).sleep):
            reported += 1
    return reported


def test_a_file_is_reported_once_at_first_and_once_per_save(tmp_path: Path) -> None:
    path, other = tmp_path / "f", tmp_path / "g"
    path.write_text("a")
    other.write_text("a")
    assert reports(path, None, None, None) == 1
    assert reports(path, None, lambda: path.write_text("bb"), None, None) == 2
    pieces = [lambda n=n: path.write_text("x" * n) for n in (2, 3, 4)]
    assert reports(path, None, *pieces, None, None) == 2, "while it is written it is not reported"
    replaced = (lambda: path.rename(tmp_path / "old"), None, lambda: other.rename(path))
    assert reports(path, None, *replaced, None, None) == 2


@pytest.mark.process
def test_a_save_is_in_force_while_it_runs(site: Site) -> None:
    site.write(queue_timeout_s=5)
    site.tidegate("up", str(site.file))
    with site.popen("apply", str(site.file), "--watch") as process:
        assert process.stdout is not None
        stored = site.state / "deployment.json"

        def in_force(timeout_s: float) -> bool:
            found: float = json.loads(stored.read_bytes())["gateway"]["queue_timeout_s"]
            return found == timeout_s

        while "No changes." not in process.stdout.readline():
            assert process.poll() is None
        site.file.write_text("models: [")
        site.write(queue_timeout_s=7)
        until(lambda: in_force(7), "the save is applied")
        site.file.write_text("models: [")
        assert process.stderr is not None
        while "valid YAML" not in (line := process.stderr.readline()):  # a save is seen in parts, too
            assert line
        assert in_force(7)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
