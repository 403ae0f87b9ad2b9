"""The one-token canary: a replica is ready only after it has answered a real request."""

from __future__ import annotations

import httpx

from policy.errors import EngineFailed
from policy.types import Runner
from serve.engine.guard import CANARY_HEADER
from serve.engine.port import EngineSpec
from store.state import SECRET_HEADER

# A pooling model embeds or scores, and which of the two only its engine knows.
_REQUESTS: dict[Runner, tuple[tuple[str, dict[str, object]], ...]] = {
    Runner.GENERATE: (("/v1/completions", {"prompt": "1", "max_tokens": 1, "temperature": 0}),),
    Runner.POOLING: (
        ("/v1/embeddings", {"input": "1"}),
        ("/v1/score", {"text_1": "1", "text_2": "1"}),
    ),
}


async def sing(url: str, spec: EngineSpec, timeout_s: float) -> None:
    """Send the canary to ``url``; raises :class:`policy.errors.EngineFailed` when it gets no answer."""
    headers = {SECRET_HEADER: spec.secret, CANARY_HEADER.decode(): "1"}
    said = ""
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, trust_env=False) as client:
        for path, body in _REQUESTS[spec.runner]:
            try:
                answer = await client.post(path, json={"model": spec.model, **body})
            except httpx.HTTPError as error:
                raise EngineFailed(f"the canary got no answer from {path}: {error!r}") from error
            if answer.status_code == httpx.codes.OK:
                return
            said = f"{path} answered {answer.status_code}: {answer.text[:300]}"
    raise EngineFailed(f"the canary failed: {said}")
