"""Locust against real vLLM: what its users measure is what the gateway's metrics say."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import CHAT
from tests.e2e.stack import ROOT, Stack

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900, func_only=True)]

# Of the gateway's figure.
AGREEMENT_PERCENT = 5.0
ROUNDS = 3


def test_users_and_gateway_agree_on_a_real_model(stack: Stack, tmp_path: Path) -> None:
    """In one of a few rounds: what else runs on the machine takes the users' time, and not the gateway's."""
    stack.steady(CHAT, 1)
    said = ""
    for number in range(ROUNDS):
        compared, said = load(stack, tmp_path / f"run{number}")
        assert compared["requests served"]["users"] == compared["requests served"]["gateway"]
        figures = [compared[quantity] for quantity in ("TTFT mean", "goodput of streams")]
        assert all(float(figure["users"]) > 0 for figure in figures)
        if all(abs(float(figure["difference (%)"])) <= AGREEMENT_PERCENT for figure in figures):
            return
    raise AssertionError(said)


def load(stack: Stack, prefix: Path) -> tuple[dict[str, dict[str, str]], str]:
    """A run of two users: users and gateway compared, by quantity, and what it printed."""
    words = ["-m", "locust", "-f", "loadtests/locustfile.py", "--headless", "--only-summary"]
    words += ["--host", stack.base_url.removesuffix("/v1"), "--admin-url", stack.admin_url]
    words += ["-u", "2", "-r", "2", "-t", "20s", "--csv", str(prefix)]
    words += ["--model", CHAT, "--prompt-tokens", "16", "--max-tokens", "8"]
    # Objectives that a slow machine meets as well; both are edges of the gateway's buckets.
    words += ["--slo-ttft-s", "3", "--slo-itl-s", "0.5"]
    ran = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with prefix.with_name(f"{prefix.name}_gateway.csv").open(newline="") as file:
        return {row["quantity"]: row for row in csv.DictReader(file)}, ran.stdout
