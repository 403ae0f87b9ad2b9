"""A real vLLM engine on one core of this machine, without a deployment around it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from policy.deployment_file.parse import parse
from serve.host.replica_host import ReplicaHost
from serve.host.weight_verification import ResolvedWeights
from store.model_weights.prepare import WeightsOrigin, prepare
from store.state_dir import StateDir
from tests.e2e.stack import ROOT
from tests.serve.hosts import host_spec

WITHIN_S = 900.0


@asynccontextmanager
async def running(**keys: Mapping[str, Any]) -> AsyncIterator[tuple[ReplicaHost, StateDir]]:
    """The engine of the shipped CPU deployment, its model changed by ``keys``, and its state directory."""
    document = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu-modes.yaml").read_text())
    document["models"][0] |= keys
    spec = parse(document).models[0]
    prepared = prepare(spec.source, token_file=None, progress=lambda _: None)
    with tempfile.TemporaryDirectory(prefix="tg-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        state = StateDir(Path(folder)).ensure()
        weights = ResolvedWeights(origin=WeightsOrigin.PACKAGE, source=spec.source, digest=prepared.digest)
        host = ReplicaHost(
            host_spec(spec, state.root, weights=weights),
            replica="r",
            address="127.0.0.1",
            node="local",
            core_claims=Path(folder) / "cores.json",
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                await host.start()
            yield host, state
        finally:
            await host.stop()
