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

from serve.engine.sim.generation_service import GenerationService, now, request_id
from serve.engine.sim.http_exchange import ApiError, read, respond
from serve.engine.sim.prompt_input import Prompts, prompts_of
from serve.engine.sim.pseudo_tokenizer import TokenizedPrompt
from serve.engine.sim.step_loop import Generation

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


async def embeddings(service: GenerationService, request: Request) -> Response:
    """A unit vector of each input."""
    body = await read(request, _EMBEDDING)
    prompts = prompts_of(body.input, "input")
    generation = service.encode(prompts, body.model)
    vectors = [embed(prompt, body.dimensions or DIMENSIONS) for prompt in prompts]
    packed = vectors if body.encoding_format == "float" else [_base64(vector) for vector in vectors]
    data = [
        {"index": index, "object": "embedding", "embedding": vector} for index, vector in enumerate(packed)
    ]
    return await _respond(request, generation, "embd", object="list", created=now(), data=data)


async def score(service: GenerationService, request: Request) -> Response:
    """The similarity of the two texts of each pair, 0..1."""
    body = await read(request, _SCORE)
    left = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    right = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not left or not right or len(left) not in (1, len(right)):
        raise ApiError(400, "text_1 must be one text, or as many as text_2", "text_1")
    pairs = list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))
    generation = service.encode(
        [TokenizedPrompt.of_text(f"{one}\n{other}") for one, other in pairs], body.model
    )
    scores = [_similarity(one, other) for one, other in pairs]
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return await _respond(request, generation, "score", object="list", created=now(), data=data)


async def rerank(service: GenerationService, request: Request) -> Response:
    """The documents, most relevant first."""
    body = await read(request, _RERANK)
    prompts = [TokenizedPrompt.of_text(f"{body.query}\n{document}") for document in body.documents]
    generation = service.encode(prompts, body.model)
    scores = [_similarity(body.query, text) for text in body.documents]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
        {"index": index, "document": {"text": body.documents[index]}, "relevance_score": scores[index]}
        for index in order
    ]
    return await _respond(request, generation, "rerank", results=results)


async def _respond(request: Request, generation: Generation, id_prefix: str, **fields: object) -> Response:
    total = sum(len(prompt.tokens) for prompt in generation.prompts)
    usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
    body = {"id": request_id(request, id_prefix), "model": generation.model, **fields, "usage": usage}
    return await respond(request, generation, lambda: body)


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def embed(prompt: TokenizedPrompt, dimensions: int = DIMENSIONS) -> list[float]:
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
    pair = zip(embed(TokenizedPrompt.of_text(one)), embed(TokenizedPrompt.of_text(other)), strict=True)
    return (1.0 + math.fsum(a * b for a, b in pair)) / 2
