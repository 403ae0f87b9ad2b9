"""The page in headless Chromium, on a running deployment under load.

With TIDEGATE_SCREENSHOTS=docs/page it writes the pictures of the documentation.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.stack import ROOT, Stack, running
from tests.page.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
AXE = "axe-core@4.14.1"
SECTIONS = ("now", "decisions", "requests", "adapters", "tenants", "playground")
PICTURES = os.environ.get("TIDEGATE_SCREENSHOTS")
# More than the initial mode can serve: a switch and changes of the count follow.
RATE_PER_S = 7.0
OUTPUT_TOKENS = 300
# How soon the page shows a new target.
FOLLOWS_S = 2.0
WIDE, NARROW = (1280, 900), (390, 800)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    document = yaml.safe_load((ROOT / "deployments" / "autoscale-sim.yaml").read_text())
    with running(document, "--no-ray") as found:
        yield found


@cache
def axe() -> str:
    """The source of the accessibility checker, from npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed: it fetches axe-core")
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tidegate-tests" / AXE
    script = folder / "package" / "axe.min.js"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(
            [npm, "pack", AXE], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        if packed.returncode:
            pytest.skip(f"npm cannot fetch {AXE}")
        shutil.unpack_archive(folder / packed.stdout.split()[-1], folder)
    return script.read_text()


@asynccontextmanager
async def page(stack: Stack, folder: Path, size: tuple[int, int] = WIDE) -> AsyncIterator[Browser]:
    """The page with its token; at the end, no console error and no request to another host."""
    async with Browser(folder) as browser:
        await browser.size(*size)
        await browser.call("Page.navigate", url=f"{stack.admin_url}/")
        await browser.until("document.getElementById('token')")
        await browser.run(
            f"document.getElementById('token').value = '{stack.state.admin_token()}';"
            "document.querySelector('main form button').click()"
        )
        await browser.until("document.getElementById('link').dataset.state === 'on'")
        yield browser
        assert browser.errors == []
        # Chromium's own start page is no request of ours.
        asked = [url for url in browser.requested if not url.startswith(("chrome:", "about:", "data:"))]
        assert asked
        assert [url for url in asked if not url.startswith(f"{stack.admin_url}/")] == []


@asynccontextmanager
async def load(stack: Stack) -> AsyncIterator[None]:
    """Requests at a steady mean rate, a third of them streams."""
    draw = random.Random(7)  # noqa: S311 - arrivals
    async with httpx.AsyncClient(
        timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as http:

        async def ask(number: int) -> None:
            messages = [{"role": "user", "content": f"Question {number}"}]
            body = {
                "model": "sim",
                "messages": messages,
                "max_tokens": OUTPUT_TOKENS,
                "stream": number % 3 == 0,
            }
            await http.post(f"{stack.base_url}/chat/completions", json=body)

        async def arrivals() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(10_000):
                    group.create_task(ask(number))
                    await asyncio.sleep(draw.expovariate(RATE_PER_S))

        sending = asyncio.create_task(arrivals())
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.wait({sending})


async def goal(stack: Stack) -> tuple[str, int]:
    status = await asyncio.to_thread(stack.model, "sim")
    return status.mode, status.target


async def picture(browser: Browser, name: str, size: tuple[int, int] = WIDE, *, dark: bool = False) -> None:
    if PICTURES:
        await browser.size(*size, dark=dark)
        await browser.run("document.activeElement.blur(); scrollTo(0, 0)")
        await asyncio.sleep(1.0)  # charts follow the size
        (ROOT / PICTURES / f"{name}.png").write_bytes(await browser.screenshot())


async def go(browser: Browser, section: str) -> None:
    await browser.run(f"location.hash = '#{section}'")
    await browser.until(f"document.querySelector('nav [aria-current]').hash === '#{section}'")
    await browser.until("document.querySelector('main').textContent.length > 40")


async def test_the_page_follows_a_switch_and_opens_its_decision(stack: Stack, tmp_path: Path) -> None:
    async with page(stack, tmp_path) as browser, load(stack):
        before = await goal(stack)
        async with asyncio.timeout(120):
            while (after := await goal(stack)) == before:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)
        mode, count = after
        shown = "document.querySelector('main').textContent"
        await browser.until(
            f"{shown}.includes('mode {mode}') && {shown}.includes('of {count}')", patience_s=FOLLOWS_S
        )
        await browser.until(f"document.querySelectorAll('.replica.good').length >= {count}")
        await asyncio.sleep(20 if PICTURES else 2)
        await picture(browser, "now", (1280, 1060))
        await go(browser, "decisions")
        await browser.until("document.querySelector('.change')")
        await browser.run("document.querySelector('.change').click()")
        await browser.until("document.querySelector('.change[aria-current]')")
        opened = await browser.run("document.querySelector('.detail').textContent")
        assert (
            await browser.run("document.querySelector('.change[aria-current] .muted').textContent") in opened
        )
        for part in ("Demand", "Supply", "Capacity", "shadow policy", "target_tracking", "Within SLO"):
            assert part in opened
        assert await browser.run("document.querySelectorAll('.canvas canvas').length") >= 5
        await picture(browser, "decisions", (1280, 1700))
        await go(browser, "requests")
        await browser.until("/predicted .+ms/.test(document.querySelector('.route summary')?.textContent)")
        await browser.until("/measured/.test(document.querySelector('main .routes').textContent)")
        await browser.run("document.querySelector('.route summary').click()")
        assert await browser.run("document.querySelector('.route tbody tr.chosen') !== null")
        await picture(browser, "requests", (1280, 760), dark=True)


async def test_an_override_needs_a_confirmation(stack: Stack, tmp_path: Path) -> None:
    async with page(stack, tmp_path) as browser:
        open_and_ask = (
            "document.querySelector('.operate').open = true;"
            "document.getElementById('operate-sim-mode').value = 'multi-replica';"
            "[...document.querySelectorAll('.operate button')]"
            ".find((each) => each.textContent === 'Set mode').click()"
        )
        await browser.until("document.querySelector('.operate')")
        for answer, overridden in (("no", False), ("yes", True)):
            await browser.run(open_and_ask)
            asked = await browser.until(
                "document.getElementById('confirm').open && document.getElementById('confirm').textContent"
            )
            assert "Switch sim to mode multi-replica for 10 minutes?" in asked
            await browser.run(f"document.querySelector('#confirm [value={answer}]').click()")
            await browser.until("!document.getElementById('confirm').open")
            await asyncio.sleep(0.5)
            status = await asyncio.to_thread(stack.model, "sim")
            assert (status.override is not None) is overridden
        await browser.until("document.querySelector('main').textContent.includes('manual override')")
        await asyncio.to_thread(stack.controller.mode, "sim", None)


async def test_the_playground_streams_with_timing_and_route(stack: Stack, tmp_path: Path) -> None:
    async with page(stack, tmp_path) as browser:
        await go(browser, "playground")
        await browser.until("document.getElementById('play-model').value === 'sim'")
        await browser.run("document.querySelector('form.form').requestSubmit()")
        first = len(await browser.until("document.querySelector('.output').textContent"))
        await browser.until(f"document.querySelector('.output').textContent.length > {first}")
        await browser.until("document.querySelector('main [role=status]').textContent === 'Complete'")
        text = await browser.run("document.querySelector('main').textContent")
        for part in ("First token", "Tokens per second", "prompt tokens", "predicted", "measured"):
            assert part in text
        await picture(browser, "playground")


async def test_a_wrong_token_is_refused_and_forgotten(stack: Stack, tmp_path: Path) -> None:
    async with Browser(tmp_path) as browser:
        await browser.call("Page.navigate", url=f"{stack.admin_url}/")
        await browser.until("document.getElementById('token')")
        await browser.run(
            "document.getElementById('token').value = 'wrong';"
            "document.querySelector('main form button').click()"
        )
        await browser.until("document.querySelector('main [role=alert]')?.textContent.includes('refused')")
        assert await browser.run("sessionStorage.length") == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_every_section_is_readable_on_a_phone_and_passes_axe(
    stack: Stack, tmp_path: Path, *, dark: bool
) -> None:
    script = axe()
    async with page(stack, tmp_path, NARROW) as browser:
        await browser.size(*NARROW, dark=dark)
        await browser.call("Runtime.evaluate", expression=script)
        for section in SECTIONS:
            await go(browser, section)
            await asyncio.sleep(1.5)  # charts and lists are filled
            width = await browser.run("document.documentElement.scrollWidth")
            assert width <= NARROW[0], section
            found = await browser.run(
                "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']})"
                ".then((result) => result.violations.map((each) => `${each.id}: ${each.nodes[0].html}`))"
            )
            assert found == [], section
        await go(browser, "now")
        await picture(browser, "phone", (390, 844), dark=dark)
