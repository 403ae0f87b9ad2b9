"""The page's files: served without the token, with a strict policy, and part of an installed package."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gateway.api.application import admin_app
from gateway.api.static_page import FOLDER
from policy.config.deployment import GatewayConfig

ROOT = Path(__file__).parents[3]
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())


async def ask(path: str) -> httpx.Response:
    services: Any = SimpleNamespace(access=SimpleNamespace(on=False))
    transport = httpx.ASGITransport(admin_app(services, lambda: "token", GatewayConfig))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path)


async def test_the_page_and_its_files_need_no_token_and_load_from_nowhere_else() -> None:
    page = await ask("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(links) >= 5
    for link in links:
        answer = await ask(f"/{link}")
        assert (answer.status_code, answer.content) == (
            200,
            (FOLDER / link.removeprefix("page/")).read_bytes(),
        )
    for answer in (page, await ask("/page/app.js")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


@pytest.mark.slow
@pytest.mark.parametrize("module", [name for name in FILES if name.endswith(".js")])
async def test_what_a_module_imports_is_served(module: str) -> None:
    for name in re.findall(r'^import .* from "\./([\w./]+)";$', (FOLDER / module).read_text(), re.MULTILINE):
        assert (await ask(f"/page/{name}")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/..%2Fadmin.py", "/page/uplot", "/page/index.html"]
)
async def test_nothing_else_is_served(path: str) -> None:
    assert (await ask(path)).status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_in_the_package(name: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["gateway.api"]
    assert any(
        fnmatch(f"page/{name}", pattern) and pattern.count("/") == f"page/{name}".count("/")
        for pattern in patterns
    )


def test_no_file_of_ours_is_long() -> None:
    lengths = {name: len((FOLDER / name).read_text().splitlines()) for name in FILES if "uplot" not in name}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
