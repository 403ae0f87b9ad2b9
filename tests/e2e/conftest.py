"""One real deployment for the session: vLLM on the CPU, on Ray Serve, a chat and a pooling model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.stack import ROOT, Stack, eventually, running
from tests.e2e.traffic import PATIENCE_S

CHAT = "smollm2"
POOLING = "smollm2-embed"
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the session's deployment last: the others start their own, or need all cores."""
    items.sort(key=lambda item: item.path.parent == FOLDER and "stack" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The shipped CPU deployment with modes and, beside it, the same weights as a pooling model."""
    document = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu-modes.yaml").read_text())
    chat = document["models"][0]
    pooling = {
        "name": POOLING,
        "source": chat["source"],
        "engine": "vllm",
        "runner": "pooling",
        "env": chat["env"],
        "engine_args": {"dtype": "float32", "enforce_eager": True, "max_model_len": 512},
        "shapes": {"small": {"cpus": 1}},
        "modes": {"multi-replica": {"shape": "small", "replicas": 1}},
    }
    document["models"].append(pooling)
    document["budget"] = {"cpus": 3}
    # These tests set counts and modes themselves, and have more run at once than keeps the objective.
    del chat["control"]["slo"]
    # On a busy machine an engine may need minutes to start, and what is asked meanwhile waits for it.
    document["gateway"]["queue_timeout_s"] = PATIENCE_S
    with running(document) as stack:
        assert stack.run("mode", CHAT, "single-large").returncode == 0
        yield stack


@contextmanager
def changed(stack: Stack) -> Iterator[dict[str, Any]]:
    """The chat model of the document, for a test to change; afterwards all is as it was, and large."""
    before = copy.deepcopy(stack.document)
    yield stack.document["models"][0]
    stack.document = before
    stack.apply()
    # Draining replicas must have ended: the budget has more cores than Ray can place replicas on.
    eventually(lambda: stack.model(CHAT).phase == "steady", 600, lambda: str(stack.model(CHAT)))
    assert stack.run("mode", CHAT, "single-large").returncode == 0
    stack.steady(CHAT, 1)
    stack.steady(POOLING, 1)
