"""The docs are true: links and paths resolve, and the words are the field's."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from pathlib import Path

import click
import pytest

from tests.test_cli_reference import commands
from tidegate.cli import group

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deployments").rglob("*.md")),
]
EXAMPLES = [ROOT / "Dockerfile", *sorted((ROOT / "deployments").rglob("*.yaml"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"``.*?``")
_LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_PATH = re.compile(
    r"`((?:policy|gateway|serve|sim|store|tidegate|loadtests|tests|docs|deployments|scripts)/[\w./-]+)`"
)

# Idioms that readers outside the project do not understand, each with the plain words for it.
BANNED = {
    r"what may stand there": "Type and range",
    r"\| without it \|": "Default",
    r"\| its own \|": "see `SECTION`",
    r"\| asks for \|": "Scales on",
    r"\| take it \|": "Use when",
    r"\bof the chance in it\b": "random seed",
    r"\bby other chance\b": "seeds",
    r"\bso many times\b": "multiply by a factor",
    r"\bfor so long\b": "duration",
    r"\bby hand until\b": "manual override",
    r"\bset by hand\b": "manual override",
    r"\bpromise[sd]?\b": "SLO; predicted saving",
    r"\bthe objectives?\b": "the SLO",
    r"\bforeseen\b": "forecast",
    r"\bleft alone\b": "ejected",
    r"\bturned away\b": "rejected",
    r"\bthe twin\b": "the simulator",
    r"\ba bed\b|\bthe bed\b": "shared GPU group",
    r"\bthe house\b|\bthe rooms\b": "packages",
    r"\bold figures\b|\bfigures are\b": "metrics",
    r"\bis told of\b|\btold 0\.": "reported",
    r"\bwhoever\b|\bwho waits\b": "a request that waits",
    r"\bturns? out no further\b": "forecast quantile",
    r"\bis kept in hand\b|\bkeeps? that much in hand\b": "headroom",
    r"\btakes nobody\b|\bin which nobody\b": "no replica",
    r"\bis no term\b|\bfor its term\b|--for TERM": "duration",
    r"\[PART\]": "[PROCESS]",
    r"\bgoes by the\b": "uses",
    r"\bonly these kinds\b": "GPU types",
    r"\bfor ever\b|\bin vain\b|\bwhatever came of\b": "permanently; without success",
    r"\bmeans harm\b": "malicious",
    r"\bby who\b|\bfor who\b|\bwho comes next\b": "by anyone who; the next one",
}
_IDIOM = re.compile("|".join(f"(?:{idiom})" for idiom in BANNED), re.IGNORECASE)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of ``page`` in one of ``languages``."""
    return [
        textwrap.dedent(body)
        for _, language, body in BLOCK.findall(page.read_text())
        if language in languages
    ]


def prose(page: Path) -> str:
    """The text of ``page`` without the output of programs, which is shown as it is printed."""
    return BLOCK.sub(lambda block: "" if block[2] in ("", "text") else block[0], page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of ``page``."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(BLOCK.sub("", page.read_text())):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower()).replace(
            " ", "-"
        )
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def idioms(text: str) -> list[str]:
    """The banned idioms in ``text``, across line ends."""
    return _IDIOM.findall(re.sub(r"\s+", " ", text))


def every_help() -> dict[str, str]:
    with click.Context(group, info_name="tidegate") as root:
        return {context.command_path: each.get_help(context) for each, context in commands(group, root)}


HELP = every_help()


def test_the_package_table_of_the_architecture_is_true() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = re.findall(r"^\| `(\w+)/` \| [^|]* \|((?: `[\w/]+`,?)+) \|$", page, re.MULTILINE)
    assert [package for package, _ in packages] == ["policy", "gateway", "serve", "sim", "store", "tidegate"]
    for package, first in packages:
        modules = {
            str(path.relative_to(ROOT / package).with_suffix("")) for path in (ROOT / package).rglob("*.py")
        }
        assert set(re.findall(r"`([\w/]+)`", first)) <= modules, package


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_resolve(page: Path) -> None:
    for link, anchor in _LINK.findall(page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    missing = [path for path in _PATH.findall(page.read_text()) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda page: page.name)
def test_docs_use_the_words_of_the_field(page: Path) -> None:
    assert idioms(prose(page)) == []


@pytest.mark.parametrize("command", HELP)
def test_help_uses_the_words_of_the_field(command: str) -> None:
    assert idioms(HELP[command]) == []


@pytest.mark.slow
@pytest.mark.parametrize("package", ["policy", "gateway", "serve", "sim", "store", "tidegate", "loadtests"])
def test_docstrings_use_the_words_of_the_field(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}": banned
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (banned := idioms(_CODE.sub("", ast.get_docstring(node) or "")))
    }
    assert found == {}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_a_page_starts_with_a_question_or_a_decision(page: Path) -> None:
    first, _, rest = page.read_text().partition("\n\n")
    assert re.fullmatch(r"# (\d+\. .+|.+\?)", first)
    assert rest.lstrip()[0] not in "#|`"


def test_the_changelog_has_the_current_version_open() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_and_tables_are_read_alike_by_all_renderers(page: Path) -> None:
    """Python-Markdown, which renders the site, wants a blank line before them and four spaces inside."""
    before = ""
    for line in BLOCK.sub("```", page.read_text()).splitlines():
        item = re.match(r"( *)(?:[-*]|\d+\.) ", line)
        if item is not None:
            assert len(item[1]) % 4 == 0, line
            assert not before or re.match(r" *(?:[-*]|\d+\.) | ", before), line
        elif not before:
            assert not re.match(r" {1,3}\S", line), line
        assert not line.startswith("|") or not before or before.startswith("|"), line
        before = line
