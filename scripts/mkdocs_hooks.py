"""The hooks of mkdocs.yml: pages from outside docs/, links to them, and no other host.

The README is the first page. Each file outside docs/ that a page links to is a page below repository/:
Markdown as it is, a folder as the list of its files, anything else as its text.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
README = PurePosixPath("README.md")
DOCS, OUTSIDE = PurePosixPath("docs"), PurePosixPath("repository")
PICTURES = {".svg", ".png"}
BACKGROUND = ("adr/", "repository/")
LANGUAGES = {".py": "python", ".yaml": "yaml"}
# Code is not searched for links.
_CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)(#[^)]*)?(?=\))")
_FOREIGN = re.compile(
    r"""<(?:script|img|iframe|source|link(?![^>]*rel="?canonical))\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>""",
    re.IGNORECASE,
)
# What a script would still ask from another host is blocked by the browser.
_POLICY = "default-src 'self' 'unsafe-inline' data: blob:"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace patterns in the navigation by the files that match."""
    config.nav = _expanded(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README and what pages link to outside docs/."""
    waiting = [README, PurePosixPath("CONTRIBUTING.md"), PurePosixPath("CHANGELOG.md")]
    for page in files.documentation_pages():
        waiting += _linked(_repository(page.src_uri), page.content_string)
    while waiting:
        path = waiting.pop()
        uri = _site(path)
        if files.get_file_from_path(uri) is None and (ROOT / path).exists():
            text = _text(path)
            files.append(File.generated(config, uri, content=text))
            waiting += _linked(path, text)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    here = page.file.src_uri
    place = _repository(here)
    # A search should find explanations first.
    if place.suffix != ".md":
        page.meta["search"] = {"exclude": True}
    elif here.startswith(BACKGROUND):
        page.meta["search"] = {"boost": 0.3}

    def link(found: re.Match[str]) -> str:
        uri = _site(_target(place, found[2]))
        return f"{found[1]}{os.path.relpath(uri, PurePosixPath(here).parent)}{found[3] or ''}"

    return "".join(text if code else _LINK.sub(link, text) for text, code in _split(markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads anything from another host, and let the browser refuse it too."""
    if found := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri}: loads from another host: {found[0]}")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    return output.replace("<head>", f"<head>\n    {meta}", 1)


def _expanded(nav: Any) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(each) for title, each in nav.items()}
    if isinstance(nav, list):
        return [item for each in nav for item in (_pages(each) if "*" in each else [_expanded(each)])]
    return nav


def _pages(pattern: str) -> list[str]:
    folder = ROOT / DOCS
    return sorted(str(page.relative_to(folder)) for page in folder.glob(pattern))


def _site(path: PurePosixPath) -> str:
    """The place in the site of a file or folder of the repository."""
    if path == README:
        return "index.md"
    inside = path.relative_to(DOCS) if path.is_relative_to(DOCS) else OUTSIDE / path
    if (ROOT / path).is_dir():
        return str(inside / "index.md")
    return str(inside) if path.suffix in {".md", *PICTURES} else f"{inside}.md"


def _repository(uri: str) -> PurePosixPath:
    """The file or folder of the repository that is the page at ``uri`` of the site."""
    path = PurePosixPath(uri)
    if uri == "index.md":
        return README
    place = path.relative_to(OUTSIDE) if path.is_relative_to(OUTSIDE) else DOCS / path
    if place.name == "index.md":
        return place.parent
    return place if (ROOT / place).exists() else place.with_suffix("")


def _target(place: PurePosixPath, link: str) -> PurePosixPath:
    folder = place if (ROOT / place).is_dir() else place.parent
    return PurePosixPath(os.path.normpath(folder / link))


def _text(path: PurePosixPath) -> str:
    """The Markdown of a page that is generated from ``path``."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if not each.name.startswith((".", "_")))
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    if path.suffix == ".md":
        return file.read_text()
    return f"# {path}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{file.read_text()}```\n"


def _linked(place: PurePosixPath, text: str) -> Iterator[PurePosixPath]:
    for part, code in _split(text):
        if not code:
            for link in _LINK.finditer(part):
                yield _target(place, link[2])


def _split(text: str) -> Iterator[tuple[str, bool]]:
    """The parts of a page, and whether each is code."""
    at = 0
    for code in _CODE.finditer(text):
        yield text[at : code.start()], False
        yield code[0], True
        at = code.end()
    yield text[at:], False
