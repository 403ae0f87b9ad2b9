"""The bytes with which the benchmark's upstream answers."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import msgspec


def json_answer(body: bytes) -> bytes:
    """A whole answer around ``body``."""
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    ) + body


def _event(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _chunk(choices: list[dict[str, Any]], **more: object) -> bytes:
    answer = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "alpha",
        "choices": choices,
        **more,
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def _choice(text: str, finish: str | None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}]


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


BODY = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "alpha",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": _usage(2048, 1),  # possible for prompts of any size here: gateways may check it
    },
    separators=(",", ":"),
).encode()
ANSWER = json_answer(BODY)

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
CHUNK = _event(_chunk(_choice(" token", None)))
LAST = _event(_chunk(_choice("", "stop")))
END = _event(b"[DONE]") + b"0\r\n\r\n"


def usage(prompt_tokens: int, tokens: int) -> bytes:
    """The usage event of a stream, from which gateways learn lengths."""
    return _event(_chunk([], usage=_usage(prompt_tokens, tokens)))


def stream_body(chunks: int) -> bytes:
    """The body of a stream of ``chunks`` events, transfer encoding undone."""
    data = [_chunk(_choice(" token", None))] * chunks + [_chunk(_choice("", "stop")), b"[DONE]"]
    return b"".join(b"data: " + each + b"\n\n" for each in data)


@lru_cache
def models(adapters: int, path: bytes) -> bytes:
    """The answer to every GET: models and adapters, or what routers ask of a worker."""
    if path.endswith((b"/health", b"/health_generate")):
        return json_answer(b"{}")
    if not path.startswith(b"/v1/models"):
        return json_answer(
            b'{"model_path":"alpha","served_model_name":"alpha","tokenizer_path":"","is_generation":true}'
        )
    listed: list[dict[str, Any]] = [
        {"id": "alpha", "object": "model", "created": 1700000000, "owned_by": "vllm", "root": "alpha",
         "parent": None, "max_model_len": 131072}
    ]  # fmt: skip
    listed += [
        {"id": adapter_name(i), "object": "model", "created": 1700000000, "owned_by": "vllm",
         "root": f"/adapters/{i}", "parent": "alpha"}
        for i in range(adapters)
    ]  # fmt: skip
    return json_answer(json.dumps({"object": "list", "data": listed}).encode())


def adapter_name(index: int) -> str:
    """The name of adapter number ``index``."""
    return f"adapter-{index:03d}"


def rendered(body: bytes) -> bytes:
    """Token ids of a chat for vllm-router's cache-aware policy: four bytes make one."""
    text = body[body.find(b'"messages"') :]
    tokens = memoryview(text[: len(text) // 4 * 4]).cast("I").tolist()
    answer = {"request_id": "r", "model": "alpha", "token_ids": tokens, "sampling_params": {}}
    return json_answer(msgspec.json.encode(answer))
