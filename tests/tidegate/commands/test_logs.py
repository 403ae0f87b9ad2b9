"""``tidegate logs``: the processes that a word selects, and the prefixes of their lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.tidegate.conftest import Site, until
from tidegate.cli import group


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    for part in ("gateway-1", "gateway-10", "replica-m-a", "replica-m-b", "ray"):
        (tmp_path / "logs" / f"{part}.log").write_text(f"first of {part}\nlast of {part}\n")
    return tmp_path


def logs(state: Path, *words: str) -> Result:
    return CliRunner().invoke(group, ["--state-dir", str(state), "logs", *words])


def test_a_prefix_selects_the_logs_of_every_matching_process(state: Path) -> None:
    shown = logs(state, "replica", "-n", "1")
    assert shown.exit_code == 0
    assert shown.output == "replica-m-a    | last of replica-m-a\nreplica-m-b    | last of replica-m-b\n"


@pytest.mark.parametrize(("word", "part"), [("gateway-1", "gateway-1"), ("ra", "ray")])
def test_lines_of_a_single_process_have_no_prefix(state: Path, word: str, part: str) -> None:
    assert logs(state, word).output == f"first of {part}\nlast of {part}\n"


@pytest.mark.process
def test_following_a_prefix_includes_processes_that_start_later(site: Site) -> None:
    folder = site.state / "logs"
    folder.mkdir(parents=True)
    (folder / "replica-a.log").write_text("old\n")
    with site.popen("logs", "replica", "-f") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "old\n"
        (folder / "replica-b.log").write_text("new\n")
        (folder / "ray.log").write_text("other\n")
        line = until(process.stdout.readline, "the new part's line")
        process.terminate()
    assert line == "replica-b      | new\n"
