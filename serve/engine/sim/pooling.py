"""``POST /v1/embeddings``, ``/v1/score`` and ``/v1/rerank`` of the simulated engine.

The vector of a text is the normalized sum of fixed vectors of its tokens, so texts that share words are
similar.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.completions import Prompts, prompts_of
from serve.engine.sim.http import ApiError, answer, read, whole
from serve.engine.sim.service import Service, request_id
from serve.engine.sim.text import Prompt

DIMENSIONS = 64


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an embedding; ``dimensions`` truncates the vectors."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS)] | None = None


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a score: two texts, one against several, or pairs."""

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a rerank: a query and the documents to order; ``top_n`` of 0 keeps all."""

    model: str | None = None
    query: str
    documents: Annotated[list[str], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0)] = 0


_EMBEDDING = msgspec.json.Decoder(EmbeddingRequest)
_SCORE = msgspec.json.Decoder(ScoreRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)


async def embeddings(service: Service, request: Request) -> Response:
    """A unit vector of each input."""
    body = await read(request, _EMBEDDING)
    prompts = prompts_of(body.input, "input")
    model = await _run(service, request, body.model, prompts)
    data: list[dict[str, object]] = []
    for index, prompt in enumerate(prompts):
        vector = embed(prompt, body.dimensions or DIMENSIONS)
        packed: object = vector
        if body.encoding_format == "base64":
            packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"index": index, "object": "embedding", "embedding": packed})
    return _listing(service, request, id_prefix="embd", model=model, data=data, prompts=prompts)


async def score(service: Service, request: Request) -> Response:
    """The similarity of the two texts of each pair, 0..1."""
    body = await read(request, _SCORE)
    left = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    right = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not left or not right or len(left) not in (1, len(right)):
        raise ApiError(400, "text_1 must be one text, or as many as text_2", "text_1")
    pairs = list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))
    prompts = [Prompt.of_text(f"{one}\n{other}") for one, other in pairs]
    model = await _run(service, request, body.model, prompts)
    data: list[dict[str, object]] = [
        {"index": index, "object": "score", "score": _similarity(one, other)}
        for index, (one, other) in enumerate(pairs)
    ]
    return _listing(service, request, id_prefix="score", model=model, data=data, prompts=prompts)


async def rerank(service: Service, request: Request) -> Response:
    """The documents, most relevant first."""
    body = await read(request, _RERANK)
    prompts = [Prompt.of_text(f"{body.query}\n{document}") for document in body.documents]
    model = await _run(service, request, body.model, prompts)
    results = [
        {"index": index, "document": {"text": text}, "relevance_score": _similarity(body.query, text)}
        for index, text in enumerate(body.documents)
    ]
    results.sort(key=lambda result: (-result["relevance_score"], result["index"]))  # type: ignore[operator]
    return answer(
        {
            "id": request_id(request, "rerank"),
            "model": model,
            "usage": _usage(prompts),
            "results": results[: body.top_n or None],
        }
    )


def _listing(
    service: Service,
    request: Request,
    *,
    id_prefix: str,
    model: str,
    data: list[dict[str, object]],
    prompts: Sequence[Prompt],
) -> Response:
    return answer(
        {
            "id": request_id(request, id_prefix),
            "object": "list",
            "created": service.now(),
            "model": model,
            "data": data,
            "usage": _usage(prompts),
        }
    )


async def _run(service: Service, request: Request, model: str | None, prompts: Sequence[Prompt]) -> str:
    """Take the engine time of the prompts; the name of the model in the answer."""
    adapter = service.resolve(model)
    generation = service.encode(prompts, adapter=adapter)
    await whole(request, generation, lambda: service.abort(generation))
    return adapter or service.model


def embed(prompt: Prompt, dimensions: int = DIMENSIONS) -> list[float]:
    """The unit vector of a prompt."""
    sums = [math.fsum(column) for column in zip(*map(_vector, prompt.tokens), strict=True)][:dimensions]
    length = math.hypot(*sums)
    return [value / length for value in sums]


@functools.lru_cache(maxsize=65_536)
def _vector(token: bytes | int) -> tuple[float, ...]:
    digest = hashlib.blake2b(repr(token).encode(), digest_size=DIMENSIONS).digest()
    return tuple(byte - 127.5 for byte in digest)


def _similarity(one: str, other: str) -> float:
    """The cosine similarity of two texts, mapped from -1..1 to 0..1."""
    pair = zip(embed(Prompt.of_text(one)), embed(Prompt.of_text(other)), strict=True)
    return (1.0 + math.fsum(a * b for a, b in pair)) / 2


def _usage(prompts: Sequence[Prompt]) -> dict[str, int]:
    total = sum(len(prompt.tokens) for prompt in prompts)
    return {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
