"""The options of the load test: on the command line, in the web page's form and as environment variables."""

from __future__ import annotations

from typing import Any

# In-flight requests may end before users are stopped: a cut request is measured on one side only.
STOP_TIMEOUT_S = "60"


def add(parser: Any, **_: object) -> None:
    """Add them to locust's parser; times are seconds, shares are fractions of requests."""

    def option(name: str, default: object, text: str, **more: object) -> None:
        variable = "TIDEGATE_LOAD_" + name[2:].replace("-", "_").upper()
        parser.add_argument(name, default=default, type=type(default), env_var=variable, help=text, **more)

    option("--model", "", "What requests name in `model`; the first of /v1/models if empty")
    option("--prompt-tokens", 256, "Length of each prompt in tokens, roughly")
    option("--max-tokens", 64, "Bound of each answer in tokens")
    option("--stream-share", 0.75, "Fraction of requests that are streamed")
    option("--abort-share", 0.0, "Fraction of requests whose client leaves before the end")
    option("--slo-ttft-s", 1.0, "Objective: time to the first token in seconds")
    option("--slo-itl-s", 0.1, "Objective: mean time per token after the first in seconds")
    option("--slo-attainment", 0.0, "Exit code 1 if a smaller fraction of requests meets the objective")
    option("--api-key", "", "Sent as a bearer token if not empty", is_secret=True)
    option("--admin-url", "http://127.0.0.1:8081", "The gateway's admin port, to compare; not asked if empty")
    parser.set_defaults(stop_timeout=STOP_TIMEOUT_S)
