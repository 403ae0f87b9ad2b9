"""The one-token canary: a replica is ready only after it has answered a real request."""

from __future__ import annotations

import httpx

from policy.errors import EngineFailed
from policy.wire.canary import CANARIES
from policy.wire.headers import CANARY_HEADER, SECRET_HEADER
from serve.engine.port import EngineSpec


async def run_canary(url: str, spec: EngineSpec, timeout_s: float) -> None:
    """Send the canary to ``url``; raises :class:`policy.errors.EngineFailed` when it gets no answer."""
    headers = {SECRET_HEADER: spec.secret, CANARY_HEADER: "1"}
    reason = ""
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, trust_env=False) as client:
        for path, body in CANARIES[spec.runner]:
            try:
                answer = await client.post(path, json={"model": spec.model, **body})
            except httpx.HTTPError as error:
                raise EngineFailed(f"the canary got no answer from {path}: {error!r}") from error
            if answer.status_code == httpx.codes.OK:
                return
            reason = f"{path} answered {answer.status_code}: {answer.text[:300]}"
    raise EngineFailed(f"the canary failed: {reason}")
