"""``tidegate logs``: the processes that a word selects, in one form and in the order of time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.tidegate.conftest import Site, until
from tidegate.cli import group

PARTS = ("access-0", "gateway-1", "gateway-10", "replica-m-a", "replica-m-b", "ray")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Each log has an old line, and a newer one at a level of its own."""
    (tmp_path / "logs").mkdir()
    now = datetime.now(UTC)
    for number, part in enumerate(PARTS):
        old, new = now - timedelta(hours=2, seconds=number), now - timedelta(seconds=60 - number)
        level = "error" if part == "ray" else "warning" if "replica" in part else "info"
        text = f'{{"at":"{old.isoformat()}","level":"info","event":"old"}}\n'
        text += f'{{"at":"{new.isoformat()}","level":"{level}","event":"new","count":1}}\n'
        (tmp_path / "logs" / f"{part}.log").write_text(text)
    return tmp_path


def logs(state: Path, *words: str) -> list[str]:
    """Process, level and text of the printed lines."""
    shown = CliRunner().invoke(group, ["--state-dir", str(state), "logs", *words])
    assert shown.exit_code == 0, shown.output
    found = [line.split(maxsplit=3) for line in shown.output.splitlines()]
    assert [line[0] for line in found] == sorted(line[0] for line in found)
    return [f"{process} {level} {text}" for _, level, process, text in found]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["replica", "-n", "1"], ["replica-m-a WARNING new count=1", "replica-m-b WARNING new count=1"]),
        (["gateway-1"], ["gateway-1 INFO old", "gateway-1 INFO new count=1"]),
        (["ra", "--since", "10m"], ["ray ERROR new count=1"]),
        (["access", "-n", "1"], ["access-0 INFO new count=1"]),
        (["--level", "error"], ["ray ERROR new count=1"]),
        (["--level", "warning", "--since", "1h", "-n", "1"],
         [f"{part} {level} new count=1" for part, level in (
             ("replica-m-a", "WARNING"), ("replica-m-b", "WARNING"), ("ray", "ERROR"))]),
        (["--since", "90s"], [f"{part} {level} new count=1" for part, level in (
            ("gateway-1", "INFO"), ("gateway-10", "INFO"), ("replica-m-a", "WARNING"),
            ("replica-m-b", "WARNING"), ("ray", "ERROR"))]),
    ],
)  # fmt: skip
def test_lines_are_selected_by_process_time_and_level(
    state: Path, words: list[str], shown: list[str]
) -> None:
    assert logs(state, *words) == shown


@pytest.mark.process
def test_following_a_prefix_includes_processes_that_start_later(site: Site) -> None:
    folder = site.state / "logs"
    folder.mkdir(parents=True)
    (folder / "replica-a.log").write_text("old\nERROR: broken\n")
    with site.popen("logs", "replica", "-f", "--level", "error") as process:
        assert process.stdout is not None
        assert process.stdout.readline().split()[1:] == ["ERROR", "replica-a", "broken"]
        (folder / "replica-b.log").write_text("new\nERROR: new\n")
        (folder / "ray.log").write_text("ERROR: other\n")
        line = until(process.stdout.readline, "the new part's line")
        process.terminate()
    assert line.split()[1:] == ["ERROR", "replica-b", "new"]
