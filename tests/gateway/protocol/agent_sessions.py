"""Sessions of coding agents as they arrive: one body per request, in the structure that each client sends."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

WORDS = (
    "read",
    "the",
    "file",
    "then",
    "change",
    "one",
    "test",
    "and",
    "run",
    "it",
    "until",
    "each",
    "passes",
)
EPHEMERAL = {"type": "ephemeral"}


class Writer:
    """Seeded text, ids and values."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311

    def text(self, words: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(words)) + ".\n"

    def hex(self, digits: int) -> str:
        return f"{self._random.getrandbits(4 * digits):0{digits}x}"

    def number(self, least: int, most: int) -> int:
        return self._random.randint(least, most)


def _schema(writer: Writer, number: int) -> dict[str, Any]:
    fields = {f"field_{i}": {"type": "string", "description": writer.text(12)} for i in range(4)}
    return {"type": "object", "properties": {f"path_{number}": {"type": "string"}, **fields}}


def claude_code(turns: int, seed: int = 1) -> Iterator[bytes]:
    """Claude Code: an attribution header that changes, and marks of the cache that move to the last message.

    A question that was typed is a text in later requests, and a marked block while it is the last message.
    """
    agent, values = Writer(seed), Writer(seed + 1)
    tools = [
        {"name": f"Tool{i}", "description": agent.text(150), "input_schema": _schema(agent, i)}
        for i in range(15)
    ]
    rules = agent.text(3000)
    session = {"device_id": agent.hex(64), "account_uuid": "", "session_id": agent.hex(32)}
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": f"<system-reminder>{agent.text(300)}</system-reminder>"},
                {"type": "text", "text": agent.text(30)},
            ],
        }
    ]
    for turn in range(turns):
        header = f"x-anthropic-billing-header: cc_version=2.1.150.{values.hex(3)}; cch={values.hex(5)};"
        system = [
            {"type": "text", "text": header},
            {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
            {"type": "text", "text": rules, "cache_control": EPHEMERAL},
        ]
        yield _compact(
            {
                "model": "m",
                "messages": [*messages[:-1], _marked(messages[-1])],
                "system": system,
                "tools": tools,
                "metadata": {"user_id": json.dumps(session)},
                "max_tokens": 32000,
                "stream": True,
            }
        )
        if turn % 9 == 8:
            answer = [{"type": "text", "text": agent.text(80)}]
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": agent.text(25)},
            ]
            continue
        uses = [
            {
                "type": "tool_use",
                "id": f"toolu_{agent.hex(24)}",
                "name": "Tool3",
                "input": {"edits": [{"old": agent.text(5), "new": agent.text(5)} for _ in range(3)]},
            }
            for _ in range(agent.number(1, 4))
        ]
        thought = {"type": "thinking", "thinking": agent.text(40), "signature": agent.hex(200)}
        results = [
            {"tool_use_id": use["id"], "type": "tool_result", "content": agent.text(agent.number(20, 300))}
            for use in uses
        ]
        messages += [
            {"role": "assistant", "content": [thought, {"type": "text", "text": agent.text(15)}, *uses]},
            {"role": "user", "content": results},
        ]


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {"role": message["role"], "content": [*blocks[:-1], {**blocks[-1], "cache_control": EPHEMERAL}]}


def codex(turns: int, seed: int = 1) -> Iterator[bytes]:
    """Codex: the Responses API with an input that grows, reasoning included, and calls in parallel."""
    agent = Writer(seed)
    tools = [
        {
            "type": "function",
            "name": f"tool_{i}",
            "description": agent.text(80),
            "parameters": _schema(agent, i),
        }
        for i in range(8)
    ]
    instructions = agent.text(3000)
    key = agent.hex(32)

    def said(role: str, kind: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    items = [
        said("developer", "input_text", agent.text(200)),
        said("user", "input_text", f"<environment_context>{agent.text(60)}</environment_context>"),
        said("user", "input_text", agent.text(40)),
    ]
    for turn in range(turns):
        yield _compact(
            {
                "model": "m",
                "instructions": instructions,
                "input": items,
                "tools": tools,
                "tool_choice": "auto",
                "store": False,
                "stream": True,
                "prompt_cache_key": key,
            }
        )
        thought = [{"type": "reasoning_text", "text": agent.text(20)}]
        items.append({"type": "reasoning", "summary": [], "content": thought, "encrypted_content": None})
        if turn % 9 == 8:
            items += [
                said("assistant", "output_text", agent.text(60)),
                said("user", "input_text", agent.text(30)),
            ]
            continue
        calls = [f"call_{agent.hex(24)}" for _ in range(agent.number(1, 3))]
        items += [
            {
                "type": "function_call",
                "name": "tool_1",
                "arguments": json.dumps({"path": agent.text(5)}),
                "call_id": call,
            }
            for call in calls
        ]
        items += [
            {"type": "function_call_output", "call_id": call, "output": agent.text(agent.number(20, 300))}
            for call in calls
        ]


def openai_chat(turns: int, seed: int = 1) -> Iterator[bytes]:
    """An agent on the official client for chat completions, which writes JSON with spaces."""
    agent = Writer(seed)
    tools = [
        {
            "type": "function",
            "function": {"name": f"t{i}", "description": agent.text(60), "parameters": _schema(agent, i)},
        }
        for i in range(10)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": agent.text(2500)},
        {"role": "user", "content": agent.text(50)},
    ]
    for turn in range(turns):
        yield json.dumps({"model": "m", "messages": messages, "tools": tools, "stream": True}).encode()
        if turn % 9 == 8:
            messages += [
                {"role": "assistant", "content": agent.text(60)},
                {"role": "user", "content": agent.text(30)},
            ]
            continue
        calls = [
            {
                "id": f"call_{agent.hex(24)}",
                "type": "function",
                "function": {"name": "t1", "arguments": json.dumps({"path": agent.text(5)})},
            }
            for _ in range(agent.number(1, 4))
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": agent.text(agent.number(20, 300))}
            for call in calls
        ]


def _compact(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
