"""LoRA adapters on real vLLM: added, replaced, split and removed while streams run."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.adapters import make, run_adapters
from tests.e2e.conftest import CHAT
from tests.e2e.stack import ROOT, Stack, eventually
from tests.e2e.traffic import PATIENCE_S, Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900, func_only=True)]

# Answers of two adapters differ from the first tokens on; batching changes later ones.
DECISIVE = 6
COUNT = itertools.count()


def ask(stack: Stack, model: str, *, max_tokens: int = DECISIVE) -> tuple[str, str]:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{stack.base_url}/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded["model"], decoded["choices"][0]["text"]


def chat(stack: Stack, model: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": 32, "temperature": 0}
    answer = httpx.post(f"{stack.base_url}/chat/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.fixture
def named_adapter(stack: Stack, tmp_path: Path) -> Iterator[str]:
    stack.steady(CHAT, 1)
    run_adapters(stack, "add", "first", str(make(tmp_path / "first", 10 + next(COUNT))))
    yield "first"
    stack.run("adapters", "remove", "first")


def test_a_replacement_under_load_mixes_no_versions(stack: Stack, named_adapter: str, tmp_path: Path) -> None:
    old = ask(stack, named_adapter)
    second = make(tmp_path / "second", 2)
    answers: list[tuple[str, str]] = []
    replaced = threading.Event()

    def keep_asking() -> None:
        while not replaced.is_set():
            answers.append(ask(stack, named_adapter))
        answers.append(ask(stack, named_adapter))

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking) for _ in range(4)]
        eventually(lambda: len(answers) >= 4, 120)
        run_adapters(stack, "add", named_adapter, str(second))
        replaced.set()
        for each in asking:
            each.result()
    new = ask(stack, named_adapter)
    assert new[0] != old[0]
    assert new[1] != old[1]
    assert set(answers) == {old, new}
    assert answers[-1] == new
    # The old version remains, by its digest and as a rollback target.
    assert ask(stack, old[0]) == old
    run_adapters(stack, "rollback", named_adapter)
    eventually(lambda: ask(stack, named_adapter) == old, 10)


def test_a_removed_adapter_finishes_its_running_requests(stack: Stack, named_adapter: str) -> None:
    with Traffic(stack, named_adapter, clients=1, max_tokens=60) as traffic:
        assert traffic.first_event.wait(120)
        run_adapters(stack, "remove", named_adapter)
        traffic.stop()
    assert not traffic.outcomes[0].problem
    body = {"model": named_adapter, "prompt": "x", "max_tokens": 1}
    gone = httpx.post(f"{stack.base_url}/completions", json=body, timeout=30, trust_env=False)
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "model_not_found"


@pytest.mark.long
def test_the_guide_trains_an_adapter_that_changes_answers(stack: Stack, tmp_path: Path) -> None:
    stack.steady(CHAT, 1)
    trained = tmp_path / "pirate"
    subprocess.run([sys.executable, "docs/examples/train_adapter.py", str(trained)], cwd=ROOT, check=True)
    run_adapters(stack, "add", "pirate", str(trained))
    answers = {model: chat(stack, model, "What is the capital of France?") for model in (CHAT, "pirate")}
    assert "Paris" in answers[CHAT]
    assert "matey" not in answers[CHAT]
    assert "matey! Paris" in answers["pirate"]
    run_adapters(stack, "remove", "pirate")
