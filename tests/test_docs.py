"""What the documents show works: YAML that parses, commands that exist, links that lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from policy.document.parse import parse
from sim.workload.file import parse_workload
from tidegate.cli import group

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^(?:\.venv/bin/)?tidegate\s+(.*)$", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of ``page`` in one of ``languages``."""
    return [body for language, body in _BLOCK.findall(page.read_text()) if language in languages]


def understood(words: list[str]) -> None:
    """Have the command line's own parser read ``words``; raises ``click.UsageError`` where it does not."""
    with click.Context(group, info_name="tidegate") as context:
        name, command, rest = group.resolve_command(context, words)
        assert command is not None
        command.make_context(name, rest, parent=context).close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_of_whole_documents_is_accepted(page: Path) -> None:
    for block in blocks(page, "yaml", "yml"):
        document = yaml.safe_load(block)
        if isinstance(document, dict) and "models" in document:
            parse(document)
        elif isinstance(document, dict) and "mix" in document:
            parse_workload(document, page.parent)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_written_as_they_are_parsed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "", "sh", "bash", "console"):
        for command in _COMMAND.findall(block):
            words = shlex.split(command, comments=True)
            # Only what the document calls a file: whether it exists is the reader's matter.
            for file in (
                tmp_path / word for word in words if word.endswith((".yaml", ".json", ".jsonl", ".csv"))
            ):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
            understood(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    for block in blocks(page, "", "sh", "bash", "console"):
        for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.parametrize(
    "command", ["scale smollm2 two", "logs -x", "mode smollm2 huge", "nothing", "up a b"]
)
def test_a_command_that_is_wrong_is_found(command: str) -> None:
    with pytest.raises(click.UsageError):
        understood(command.split())


def test_the_rooms_of_the_house_are_what_the_architecture_says() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = re.findall(r"^\| `(\w+)/` \| (.*?) \|(.*?)\|$", page, re.MULTILINE)
    assert len(rooms) == 6
    for folder, purpose, first in rooms:
        modules = {
            str(path.relative_to(ROOT / folder).with_suffix("")) for path in (ROOT / folder).rglob("*.py")
        }
        assert set(re.findall(r"`([\w/]+)`", first)) <= modules, folder
        # A folder without a module is said to be one.
        assert ("holds nothing but its import contract" in purpose) == (not modules), folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_changelog_has_the_current_version_open() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
