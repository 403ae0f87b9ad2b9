"""The simulated engine's HTTP app: vLLM's routes for its runner, and no others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from policy.errors import EngineFailed
from policy.types import Runner
from serve.engine.sim.anthropic_messages import count_tokens, messages
from serve.engine.sim.completions import chat, completions, detokenize, tokenize
from serve.engine.sim.generation_service import GenerationService
from serve.engine.sim.http_exchange import answer, on_error
from serve.engine.sim.pooling import embeddings, rerank, score
from serve.engine.sim.responses_api import responses

Endpoint = Callable[[GenerationService, Request], Awaitable[Response]]


async def models(service: GenerationService, _: Request) -> Response:
    """The base model and its adapters."""

    def card(name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": service.max_model_len if parent is None else None,
            "permission": [],
        }

    adapters = [card(name, path, service.model) for name, path in service.adapters.items()]
    return answer({"object": "list", "data": [card(service.model, service.model, None), *adapters]})


async def metrics(service: GenerationService, _: Request) -> Response:
    """Prometheus' text format."""
    return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


_ALWAYS: dict[str, Endpoint] = {"/tokenize": tokenize, "/detokenize": detokenize}
_POST: dict[Runner, dict[str, Endpoint]] = {
    Runner.GENERATE: {
        "/v1/chat/completions": chat,
        "/v1/completions": completions,
        "/v1/responses": responses,
        "/v1/messages": messages,
        "/v1/messages/count_tokens": count_tokens,
    },
    Runner.POOLING: {"/v1/embeddings": embeddings, "/v1/score": score, "/v1/rerank": rerank},
}
_GET: dict[str, Endpoint] = {"/v1/models": models, "/metrics": metrics}


def build(service: GenerationService) -> Starlette:
    """The ASGI app over ``service``."""
    posts = {**_ALWAYS, **_POST[service.runner]}
    return Starlette(
        routes=[
            Route(path, partial(endpoint, service), methods=[method])
            for method, endpoints in (("POST", posts), ("GET", _GET))
            for path, endpoint in endpoints.items()
        ],
        exception_handlers={EngineFailed: on_error, HTTPException: on_error},
    )
