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

    def __init__(self, *, is_fast: bool = True, backend: Any = None) -> None:
        self.tokenizer = SimpleNamespace(is_fast=is_fast)
        self.limited: list[Any] = []
        render_short_prompts(self, apply_template, backend)

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        return prompt["prompt"].split(), params, threading.get_ident()

    def _build_tokens_prompt(self, ids: list[int], prompt: Any) -> Any:
        return ids, prompt

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


class Backend:
    """A tokenizer of the library tokenizers: a token for each character, and one before them."""

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        special = [0] if add_special_tokens else []
        return [Encoding([*special, *map(ord, text)]) for text in texts]


class Encoding:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)


class Parameters:
    """vLLM's ``TokenizeParams``."""

    def __init__(self, *, offsets: bool = False, **options: Any) -> None:
        self.return_token_offsets = offsets
        self._options = options

    def get_encode_kwargs(self) -> dict[str, Any]:
        return self._options


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


async def test_the_backend_makes_the_tokens_of_short_prompts() -> None:
    renderer = Renderer(backend=Backend())
    SHORT.set(True)
    prompt = {"prompt": "ab"}
    for options, tokens in (
        ({"truncation": False, "add_special_tokens": True}, [0, 97, 98]),
        ({"truncation": True, "max_length": 2, "add_special_tokens": False}, [97, 98]),
    ):
        found = await renderer._tokenize_prompt_async(prompt, Parameters(**options))
        assert found == (tokens, prompt)


@pytest.mark.parametrize(
    "params",
    [
        Parameters(truncation=True, max_length=2, add_special_tokens=True),
        Parameters(truncation=False, add_special_tokens=True, offsets=True),
        Parameters(truncation=False, add_special_tokens=True, return_length=True),
    ],
    ids=["truncated", "offsets", "another option"],
)
async def test_what_the_backend_does_not_do_is_done_by_transformers(params: Parameters) -> None:
    renderer = Renderer(backend=Backend())
    SHORT.set(True)
    here = threading.get_ident()
    assert await renderer._tokenize_prompt_async({"prompt": "a b"}, params) == (["a", "b"], params, here)
