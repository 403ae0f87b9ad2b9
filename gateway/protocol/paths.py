"""The hot routes of the client port: the closed list of paths that reach a replica."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from policy.types import Runner


class Api(Enum):
    """Whose stream and error format a route speaks."""

    OPENAI = "openai"
    RESPONSES = "responses"
    MESSAGES = "messages"


class Route(NamedTuple):
    """A path of ours, the replica's path for it, and which models can serve it (``None``: all).

    ``prompt`` is the field that carries what the model reads, where it is one field.
    """

    path: str
    upstream: bytes
    summary: str
    runner: Runner | None = None
    prompt: str | None = None
    api: Api = Api.OPENAI


ROUTES = {
    route.path: route
    for route in (
        Route("/v1/chat/completions", b"/v1/chat/completions", "Answer a chat", Runner.GENERATE, "messages"),
        Route("/v1/completions", b"/v1/completions", "Continue a text", Runner.GENERATE, "prompt"),
        Route(
            "/v1/responses", b"/v1/responses", "Answer, as responses", Runner.GENERATE, "input", Api.RESPONSES
        ),
        Route(
            "/v1/messages",
            b"/v1/messages",
            "Answer, Anthropic's way",
            Runner.GENERATE,
            "messages",
            Api.MESSAGES,
        ),
        Route("/v1/embeddings", b"/v1/embeddings", "Turn texts into vectors", Runner.POOLING, "input"),
        Route("/v1/score", b"/v1/score", "Score pairs of texts", Runner.POOLING),
        Route("/v1/rerank", b"/v1/rerank", "Rank documents for a query", Runner.POOLING),
        Route("/v1/tokenize", b"/tokenize", "Turn a text into tokens"),
        Route("/v1/detokenize", b"/detokenize", "Turn tokens into a text"),
    )
}
