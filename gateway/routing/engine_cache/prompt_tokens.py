"""The tokens of a prompt, as the server that got it makes them: vLLM's ``/tokenize`` renders chats and texts.

Only what that route renders as the API does is asked for. Source: vLLM's ``entrypoints/serve/tokenize``
(0.32).
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Hashable
from typing import Final

import msgspec
from msgspec import Raw

from gateway.http.buffered_request import post
from gateway.http.http1_client import ConnectionPool
from gateway.protocol.body import RequestBody
from gateway.protocol.json_decoders import OPTIONS
from gateway.protocol.paths import COMPLETIONS, ProxyRoute
from policy.hashing import block_keys

# Of a prompt and of the answer, which is decoded in one turn of the event loop: some 150,000 tokens.
MAX_BYTES: Final = 1024 * 1024
ASK_S: Final = 5.0
PATH: Final = b"/tokenize"
# Blocks whose keys are made in one turn of the event loop, in 3 ms.
KEYS_A_TURN: Final = 1024
# Fields that both routes have, and fields with which the API renders something that the route does not.
_CHAT = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
_OF_TEMPLATE = ("add_special_tokens", "chat_template_kwargs", "mm_processor_kwargs")
_OTHERWISE = ("truncate_prompt_tokens", "documents", "prompt_embeds")
_NULL = b"null"


class TokenizeResponse(msgspec.Struct):
    """Of ``/tokenize``."""

    tokens: list[int]


_ANSWER = msgspec.json.Decoder(TokenizeResponse)
_TOKENS = msgspec.json.Decoder(list[int])
_TEXT = msgspec.json.Decoder(str)


class TokenizablePrompt:
    """A prompt as it was sent: its body with ``model`` for the model's name there.

    ``adapter`` and ``salt`` are what an engine adds to the identity of its blocks.
    """

    __slots__ = ("adapter", "body", "model", "route", "salt")

    def __init__(
        self, route: ProxyRoute, body: RequestBody, *, model: str, adapter: str, salt: bytes
    ) -> None:
        self.route = route
        self.body = body
        self.model = model
        self.adapter = adapter
        self.salt = ""
        given = salt or bytes(body.cache_salt)
        if given and given != _NULL:
            with contextlib.suppress(ValueError):  # the server refuses it
                self.salt = _TEXT.decode(given)

    def extras(self, blocks: int) -> list[Hashable]:
        """What vLLM adds to each of the blocks, as in its events."""
        usual = (self.adapter,) if self.adapter else ()
        first = (*usual, self.salt) if self.salt else usual
        return [first or None, *[usual or None] * (blocks - 1)] if first else []

    def tokens(self) -> list[int] | None:
        """Those of a prompt that is given as tokens."""
        prompt = memoryview(self.body.prompt)
        if self.route.path != COMPLETIONS or not prompt or prompt[0] != ord("["):
            return None
        if len(prompt) > MAX_BYTES or self.body.media or self._has(_OTHERWISE):
            return None
        try:
            return _TOKENS.decode(prompt)
        except msgspec.ValidationError:
            return None  # texts

    async def keys(self, tokens: list[int], block_tokens: int) -> array[int]:
        """The key of each full block of ``tokens``; of a long prompt in several turns of the event loop."""
        blocks = len(tokens) // block_tokens
        extras, found, parent = self.extras(blocks), array("q"), 0
        for first in range(0, blocks, KEYS_A_TURN):
            if first:
                await asyncio.sleep(0)
            end = min(first + KEYS_A_TURN, blocks)
            part = tokens[first * block_tokens : end * block_tokens]
            found.extend(block_keys(part, block_tokens, parent, extras[first:end]))
            parent = found[-1]
        return found

    def question(self) -> bytes | None:
        """The body to ask the server with; ``None`` where its answer would not be these tokens."""
        body = self.body
        if body.media or self._has(_OTHERWISE):
            return None
        if self.route.path == "/v1/chat/completions":
            given = {name: self._given(name) for name in (*_CHAT, *_OF_TEMPLATE)}
            given["chat_template_kwargs"] = self._template_arguments()
            has_prompt = given["messages"] is not None
        elif self.route.path == COMPLETIONS:
            given = {name: self._given(name) for name in ("prompt", "add_special_tokens")}
            prompt = given["prompt"]
            has_prompt = prompt is not None and memoryview(prompt)[0] == ord('"')
        else:
            return None
        members = {name: value for name, value in given.items() if value is not None}
        size = sum(len(memoryview(value)) for value in members.values())
        if not has_prompt or size > MAX_BYTES:
            return None
        return msgspec.json.encode({"model": self.model, **members})

    def _given(self, name: str) -> Raw | None:
        value = self.body.members.get(name)
        return None if value is None or bytes(memoryview(value)[:5]) == _NULL else value

    def _has(self, names: tuple[str, ...]) -> bool:
        return any(self._given(name) is not None for name in names)

    def _template_arguments(self) -> Raw | None:
        """With those that the API makes of the effort to reason."""
        given, effort = self._given("chat_template_kwargs"), self._given("reasoning_effort")
        if effort is None:
            return given
        arguments = dict((OPTIONS.decode(given) if given is not None else None) or {})
        arguments.setdefault("reasoning_effort", effort)
        thinks = Raw(b"false") if bytes(effort) == b'"none"' else Raw(b"true")
        arguments.setdefault("enable_thinking", thinks)
        return Raw(msgspec.json.encode(arguments))


async def ask(pool: ConnectionPool, constant_head: bytes, question: bytes) -> tuple[int, list[int]]:
    """Status and tokens of the server's answer; raises ``OSError`` (timeouts included) or ``ValueError``."""
    status, body = await post(pool, PATH, constant_head, question, within_s=ASK_S, max_bytes=MAX_BYTES)
    return status, _ANSWER.decode(body).tokens if status == 200 else []
