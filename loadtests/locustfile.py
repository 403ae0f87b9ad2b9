"""Load for a Tidegate deployment, with TTFT, ITL, tokens/s and goodput; see docs/load-testing.md.

Run from the checkout: ``.venv/bin/locust -f loadtests/locustfile.py --headless -u 8 -t 60s``.
"""

from __future__ import annotations

from typing import Any

from locust import events

from loadtests import options
from loadtests.locust_run import LocustRun
from loadtests.slo_attainment import RunStatistics
from loadtests.users import ChatUser, CompletionUser

__all__ = ["ChatUser", "CompletionUser"]


def prepare(environment: Any, **_: object) -> None:
    """Create the ledger of the process, in locust's environment, and its listeners."""
    environment.ledger = RunStatistics()
    LocustRun(environment)


events.init_command_line_parser.add_listener(options.add)
events.init.add_listener(prepare)
