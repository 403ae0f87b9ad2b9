"""Requests that vLLM's app and the fast path answer alike, and the comparison of their answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httpx

from serve.engine.fast_path.eligibility import eligible
from tests.e2e.random_requests import CHAT, COMPLETION, INVALID, Request, Values, draw

# Beside those that are also drawn at random: what only one replica's engine is asked for here.
_MORE: Values = {
    "priority": [0, 1, -1, 2**63], "request_id": ["r", 5], "allowed_token_ids": [[5, 6, 7], [], [10**6]],
    "stream_options": [
        None, {}, {"include_usage": None}, {"include_usage": False}, {"continuous_usage_stats": True},
    ],
    "metadata": [{"a": "b"}], "store": [True], "service_tier": ["auto"], "safety_identifier": ["s"],
    "prompt_cache_key": ["k"], "prompt_cache_retention": ["24h"], "prompt_cache_options": [{"a": 1}],
    "moderation": [{"model": "m"}], "best_of": [1, 2], "early_stopping": [True],
    "prompt_logprobs": [0, 1, -2], "use_beam_search": [False, True], "vllm_xargs": [{"a": 1}, {"a": {}}],
    "kv_transfer_params": [{"do_remote_decode": True}, "x"], "ec_transfer_params": [{"a": 1}],
}  # fmt: skip
_MORE_CHAT: Values = _MORE | {
    "prediction": [{"type": "content", "content": "Name"}], "modalities": [["text"]], "verbosity": ["low"],
    "return_prompt_text": [False, True], "chat_template": ["{{ messages }}"],
    "media_io_kwargs": [{"image": {}}, []], "mm_processor_kwargs": [{"a": 1}],
}  # fmt: skip
_MORE_COMPLETION: Values = _MORE | {"prompt_embeds": ["AAAA", [], ["?"]]}
# What vLLM does only, or otherwise, without a stream.
_WHOLE = {"prompt_logprobs", "use_beam_search"}


def _with(table: Values, more: Values) -> Values:
    return table | {name: [*table.get(name, []), *values] for name, values in more.items()}


PATHS: dict[str, Values] = {
    "/v1/chat/completions": _with(CHAT, _MORE_CHAT), "/v1/completions": _with(COMPLETION, _MORE_COMPLETION),
}  # fmt: skip
# vLLM's app answers a page of another origin.
TO_VLLM = {"origin": "http://page.invalid"}
TOKENS = 8
DRAWN = 80
SEED = 20
# The first to come finds no blocks cached, and a busy process merges the outputs of steps in vLLM's events.
TRIES = 5
_OWN = re.compile(rb'"id":"[^"]*"|"created":\d+')
_OF_ORIGIN = ("access-control-", "vary", "date")
# Bytes of characters, which the model mixes: most are cut between two tokens.
SPLIT = "🌊漢字é\N{GRINNING FACE}\N{WOMAN}\N{ZERO WIDTH JOINER}"

# In the smoke test: so many of the requests, with so few tokens.
PART, PART_TOKENS = 40, 4

Ask = Callable[[Request, dict[str, str]], Awaitable[httpx.Response]]


class Answer(NamedTuple):
    """What a client can tell apart, without identifiers and times."""

    status: int
    headers: dict[str, str]
    events: list[bytes]


def seen(answer: httpx.Response) -> Answer:
    headers = {name: value for name, value in answer.headers.items() if not name.startswith(_OF_ORIGIN)}
    return Answer(answer.status_code, headers, _OWN.sub(b'"own":0', answer.content).split(b"\n\n"))


async def differences(requests: list[Request], ask: Ask) -> list[str]:
    """The requests whose answers differ, with both; ``ask`` sends one, with further headers."""
    found = []
    for request in requests:
        # In its streams, outputs are merged and prompts take turns as it happens.
        by_vllm = request.body.get("stream") and not eligible(request.path, [], request.body)
        for _ in range(TRIES):
            fast, vllm = seen(await ask(request, {})), seen(await ask(request, TO_VLLM))
            if fast == vllm or (by_vllm and fast[:2] == vllm[:2]):
                break
        else:
            found.append(f"{request}\n fast: {fast}\n vLLM: {vllm}")
    return found


async def send(http: httpx.AsyncClient, request: Request, headers: dict[str, str]) -> httpx.Response:
    """Also what HTTPX refuses to encode."""
    content = json.dumps(request.body)
    return await http.post(
        request.path, content=content, headers={"content-type": "application/json", **headers}
    )


def part(model: str) -> list[Request]:
    """:data:`PART` requests of :func:`corpus`, shorter."""
    requests = corpus(model, [], PART_TOKENS)
    return requests[:: len(requests) // PART]


def corpus(model: str, split: list[int], tokens: int = TOKENS) -> list[Request]:
    """Each value of each parameter by itself, valid and not, and some of all together; greedy or seeded.

    ``split`` are the tokens of :data:`SPLIT`, ``tokens`` those of an answer without another limit.
    """
    requests = []
    for path, table in PATHS.items():
        for number, (name, values) in enumerate(table.items()):
            for value in [*values, *INVALID.get(name, [])]:
                # A stream has more that can differ.
                for stream in (True,) if number % 2 and name not in _WHOLE else (True, False):
                    requests.append(
                        Request(path, base(path, model, tokens) | {"stream": stream, name: value})
                    )
        parts = {"allowed_token_ids": split, "temperature": 1.5, "max_tokens": 24, "ignore_eos": True}
        for seed in range(10):
            body = base(path, model) | parts | {"seed": seed, "stream": seed < 8}
            requests.append(Request(path, body | ({"stop": ["漢", "\ufffd"]} if seed % 3 == 0 else {})))
    chance = random.Random(SEED)  # noqa: S311 - the same each time
    drawn = (draw(chance, [model, "nobody"]) for _ in iter(int, 1))
    mixed = (Request(f"/v1{path}", body) for path, body in drawn if f"/v1{path}" in PATHS)
    requests += [
        Request(path, {"seed": 7} | body) for (path, body), _ in zip(mixed, range(DRAWN), strict=False)
    ]
    return requests


def base(path: str, model: str, tokens: int = TOKENS) -> dict[str, Any]:
    """A short greedy request."""
    prompt: dict[str, Any] = {"prompt": "The tide"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "Name three seas."}]}
    return {"model": model, **prompt, "max_tokens": tokens, "temperature": 0, "seed": 7}
