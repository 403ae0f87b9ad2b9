"""The options of the load test: on the command line, in the web page's form and as environment variables."""

from __future__ import annotations

from typing import Any

from sim.arrivals import Arrival
from tidegate.replay.prompts import PromptGenerator

# In-flight requests may end before users are stopped: a request that is cut is in one side's metrics only.
STOP_TIMEOUT_S = "60"


def add(parser: Any, **_: object) -> None:
    """Add the options to locust's parser; times are seconds, shares are fractions of requests."""

    def option(name: str, default: object, text: str, **more: object) -> None:
        variable = "TIDEGATE_LOAD_" + name[2:].replace("-", "_").upper()
        parser.add_argument(name, default=default, type=type(default), env_var=variable, help=text, **more)

    option("--model", "", "Model of the requests; the first of /v1/models if empty")
    option("--prompt-tokens", 256, "Approximate length of each prompt in tokens")
    option("--max-tokens", 64, "Maximum tokens of each answer")
    option("--stream-share", 0.75, "Fraction of requests that are streamed")
    option("--abort-share", 0.0, "Fraction of requests that the client aborts")
    option("--slo-ttft-s", 1.0, "Objective: time to the first token in seconds")
    option("--slo-itl-s", 0.1, "Objective: mean time per token after the first in seconds")
    option("--slo-attainment", 0.0, "Exit code 1 if a smaller fraction of requests meets the SLO")
    option("--api-key", "", "Sent as a bearer token if not empty", is_secret=True)
    option(
        "--admin-url", "http://127.0.0.1:8081", "The gateway's admin port, for the comparison; none if empty"
    )
    parser.set_defaults(stop_timeout=STOP_TIMEOUT_S)


_INSTRUCTION = "Write a long story with these words:"
_INSTRUCTION_TOKENS = 8


_PROMPTS = PromptGenerator(seed=0)


def prompt(tokens: int, number: int) -> str:
    """A prompt of about ``tokens`` tokens; prompts of different ``number`` share no cached prefix."""
    length = max(1, tokens - _INSTRUCTION_TOKENS)
    return f"({number:x}) {_INSTRUCTION} {_PROMPTS.text(Arrival(0.0, length, 0), number)}"
