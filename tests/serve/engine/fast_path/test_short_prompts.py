"""Prompts that are rendered in the event loop, by a renderer of the shape of vLLM's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from serve.engine.fast_path.short_prompts import MAX_PROMPT, SHORT, render_short_prompts


class Renderer:
    """Renders in threads, and limits the time of a template as vLLM does: of a future."""

    def __init__(self, *, is_fast: bool = True) -> None:
        self.tokenizer = SimpleNamespace(is_fast=is_fast)
        self.limited: list[Any] = []
        render_short_prompts(self, apply_template)

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        return prompt["prompt"].split(), params, threading.get_ident()

    async def _tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        return await asyncio.to_thread(self._tokenize_prompt, prompt, params)

    def _apply_chat_template_async(self, messages: str, *, upper: bool) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(None, lambda: apply_template(messages, upper=upper))

    async def _render_with_timeout(self, rendering: Awaitable[Any]) -> Any:
        self.limited.append(rendering)
        return await rendering

    async def render(self, messages: str) -> tuple[Any, Any]:
        """The prompt and its tokens, as vLLM makes them, each with the thread that made it."""
        applied = self._apply_chat_template_async(messages, upper=True)
        text, thread = await self._render_with_timeout(applied)
        return (text, thread), await self._tokenize_prompt_async({"prompt": text}, "params")


def apply_template(messages: str, *, upper: bool) -> tuple[str, int]:
    if not messages:
        raise ValueError("no messages")
    return messages.upper() if upper else messages, threading.get_ident()


async def test_a_short_prompt_is_rendered_in_the_event_loop() -> None:
    here = threading.get_ident()
    renderer = Renderer()
    SHORT.set(True)
    assert await renderer.render("a b") == (("A B", here), (["A", "B"], "params", here))
    assert not renderer.limited
    with pytest.raises(ValueError, match="no messages"):
        await renderer.render("")


async def test_other_prompts_are_rendered_in_threads_and_the_time_of_their_templates_is_limited() -> None:
    here = threading.get_ident()
    renderer = Renderer()
    (text, thread), (tokens, params, other) = await renderer.render("a b")
    assert (text, tokens, params) == ("A B", ["A", "B"], "params")
    assert here not in (thread, other)
    assert len(renderer.limited) == 1
    # The body was short, its template made a long prompt of it.
    SHORT.set(True)
    _, _, thread = await renderer._tokenize_prompt_async({"prompt": "x" * (MAX_PROMPT + 1)}, None)
    assert thread != here


async def test_a_request_is_short_for_itself_alone() -> None:
    renderer = Renderer()
    here = threading.get_ident()

    async def serve(is_short: bool) -> bool:
        SHORT.set(is_short)
        await asyncio.sleep(0)
        return bool((await renderer.render("a"))[0][1] == here)

    assert await asyncio.gather(*map(serve, (True, False, True))) == [True, False, True]


async def test_a_tokenizer_in_python_stays_in_threads() -> None:
    renderer = Renderer(is_fast=False)
    SHORT.set(True)
    (_, thread), _ = await renderer.render("a b")
    assert thread != threading.get_ident()
