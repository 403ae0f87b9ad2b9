"""What the documents show works: YAML that parses, commands that exist, links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import yaml

from policy.parsing import parse
from tidegate.cli import group

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of ``page`` in one of ``languages``."""
    return [body for language, body in _BLOCK.findall(page.read_text()) if language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_of_whole_documents_is_accepted(page: Path) -> None:
    for block in blocks(page, "yaml", "yml"):
        document = yaml.safe_load(block)
        if isinstance(document, dict) and "models" in document:
            parse(document)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    context = click.Context(group)
    for block in blocks(page, "sh", "bash", "console"):
        for command in re.findall(r"(?:^|\s)tidegate\s+((?!-)[a-z]+)\b", block):
            assert group.get_command(context, command) is not None, f"{page.name}: tidegate {command}"
        for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_changelog_has_the_current_version_open() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
