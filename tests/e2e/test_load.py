"""Locust against real vLLM: what its users measure is what the gateway's metrics say."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import CHAT
from tests.e2e.stack import ROOT, Stack

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]

# Of the gateway's figure.
AGREEMENT_PERCENT = 5.0


def test_users_and_gateway_agree_on_a_real_model(stack: Stack, tmp_path: Path) -> None:
    stack.steady(CHAT, 1)
    prefix = tmp_path / "run"
    words = ["-m", "locust", "-f", "loadtests/locustfile.py", "--headless", "--only-summary"]
    words += ["--host", stack.base_url.removesuffix("/v1"), "--admin-url", stack.admin_url]
    words += ["-u", "2", "-r", "2", "-t", "20s", "--csv", str(prefix)]
    words += ["--model", CHAT, "--prompt-tokens", "16", "--max-tokens", "8"]
    ran = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with prefix.with_name("run_gateway.csv").open(newline="") as file:
        compared = {row["quantity"]: row for row in csv.DictReader(file)}
    assert compared["requests served"]["users"] == compared["requests served"]["gateway"]
    for quantity in ("TTFT mean", "goodput of streams"):
        assert float(compared[quantity]["users"]) > 0
        assert abs(float(compared[quantity]["difference (%)"])) <= AGREEMENT_PERCENT, ran.stdout
