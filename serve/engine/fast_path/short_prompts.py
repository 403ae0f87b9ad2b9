"""Short prompts are rendered in the event loop.

vLLM renders the chat template and makes the tokens of each prompt in threads. For a short one the hand-over
to a thread and back takes longer than the work. So do the objects that transformers makes of each text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final

# Bytes of a request's body, and characters of the prompt that is made of it. Both take below a millisecond.
MAX_BODY: Final = 2048
MAX_PROMPT: Final = 4096

# What may be asked for of the tokens.
_OPTIONS: Final = {"truncation", "max_length", "add_special_tokens"}

# Whether the body of the task's request is that short.
SHORT: Final[ContextVar[bool]] = ContextVar("short", default=False)


def render_short_prompts(renderer: Any, apply_template: Callable[..., Any], backend: Any) -> None:
    """Have vLLM's ``HfRenderer`` render the prompts of requests that are :data:`SHORT` at once.

    ``apply_template`` is what it calls in a thread. Not for tokenizers in Python. Templates must be those
    of the server: vLLM limits the time of those that a request brings. ``backend`` is the ``Tokenizer`` of
    the library tokenizers that makes the same tokens as the renderer's tokenizer, ``None`` without one.
    """
    if not getattr(renderer.tokenizer, "is_fast", False):
        return
    tokenize = renderer._tokenize_prompt if backend is None else _by_backend(renderer, backend)
    tokenize_in_thread = renderer._tokenize_prompt_async
    apply_in_thread, limit = renderer._apply_chat_template_async, renderer._render_with_timeout

    async def tokenized(prompt: Any, params: Any) -> Any:
        if SHORT.get() and len(prompt["prompt"]) <= MAX_PROMPT:
            return tokenize(prompt, params)
        return await tokenize_in_thread(prompt, params)

    async def applied(*args: Any, **options: Any) -> Any:
        return apply_template(*args, **options)

    def apply(*args: Any, **options: Any) -> Awaitable[Any]:
        rendering: Awaitable[Any] = (applied if SHORT.get() else apply_in_thread)(*args, **options)
        return rendering

    async def limited(rendering: Awaitable[Any]) -> Any:
        # What is rendered at once cannot be interrupted.
        return await (limit(rendering) if asyncio.isfuture(rendering) else rendering)

    renderer._tokenize_prompt_async = tokenized
    renderer._apply_chat_template_async = apply
    renderer._render_with_timeout = limited


def _by_backend(renderer: Any, backend: Any) -> Callable[[Any, Any], Any]:
    """``renderer._tokenize_prompt`` without transformers."""
    tokenize = renderer._tokenize_prompt

    def tokenized(prompt: Any, params: Any) -> Any:
        options = params.get_encode_kwargs()
        if params.return_token_offsets or options.keys() - _OPTIONS:
            return tokenize(prompt, params)
        (encoding,) = backend.encode_batch_fast(
            [prompt["prompt"]], add_special_tokens=options["add_special_tokens"]
        )
        if options["truncation"] and len(encoding) > options["max_length"]:
            return tokenize(prompt, params)
        return renderer._build_tokens_prompt(encoding.ids, prompt)

    return tokenized
