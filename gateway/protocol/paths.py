"""The hot routes of the client port: the closed list of paths that reach a replica."""

from __future__ import annotations

from enum import Enum
from typing import Final

from policy.types import Runner

# The only route of several prompts, whose answers are short unless the request says more.
COMPLETIONS: Final = "/v1/completions"


class ApiDialect(Enum):
    """Whose stream and error format a route speaks."""

    OPENAI = "openai"
    RESPONSES = "responses"
    MESSAGES = "messages"


class ProxyRoute:
    """A path of ours, the replica's path for it, and which models compute for it.

    ``runner`` is ``None`` where an engine only tokenizes, which costs it no step.
    ``prompt`` is the field that carries what the model reads, where it is one field beside its tools and
    system prompt.
    """

    # Written out, because named tuples are not compiled.
    __slots__ = ("api", "path", "prompt", "runner", "summary", "upstream")

    def __init__(  # noqa: PLR0917 - in the order of the table below
        self,
        path: str,
        upstream: bytes,
        summary: str,
        runner: Runner | None = None,
        prompt: str | None = None,
        api: ApiDialect = ApiDialect.OPENAI,
    ) -> None:
        self.path = path
        self.upstream = upstream
        self.summary = summary
        self.runner = runner
        self.prompt = prompt
        self.api = api


def is_anthropic(path: str) -> bool:
    """Whether answers at ``path``, which need not be a route, have Anthropic's error format and headers."""
    return path.startswith("/v1/messages") and path[12:13] in ("", "/")


def _route(
    path: str,
    summary: str,
    runner: Runner | None = None,
    prompt: str | None = None,
    api: ApiDialect = ApiDialect.OPENAI,
) -> ProxyRoute:
    """A route that engines serve at the same path, or, if all models serve it, without ``/v1``."""
    upstream = path.removeprefix("/v1") if runner is None else path
    return ProxyRoute(path, upstream.encode(), summary, runner, prompt, api)


_ROUTES = (
    _route("/v1/chat/completions", "Answer a chat", Runner.GENERATE, "messages"),
    _route(COMPLETIONS, "Continue a text", Runner.GENERATE, "prompt"),
    _route("/v1/responses", "Answer, as responses", Runner.GENERATE, "input", ApiDialect.RESPONSES),
    _route("/v1/messages", "Answer, Anthropic's way", Runner.GENERATE, "messages", ApiDialect.MESSAGES),
    ProxyRoute(
        "/v1/messages/count_tokens",
        b"/v1/messages/count_tokens",
        "Count the tokens of a message",
        prompt="messages",
        api=ApiDialect.MESSAGES,
    ),
    _route("/v1/embeddings", "Turn texts into vectors", Runner.POOLING, "input"),
    _route("/v1/score", "Score pairs of texts", Runner.POOLING),
    _route("/v1/rerank", "Rank documents for a query", Runner.POOLING),
    _route("/v1/tokenize", "Turn a text into tokens"),
    _route("/v1/detokenize", "Turn tokens into a text"),
)
ROUTES = {route.path: route for route in _ROUTES}
