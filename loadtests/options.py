"""The options of the load test: on the command line, in the web page's form and as environment variables.

Prompts of about a given length that no prefix cache has seen."""

from __future__ import annotations

import random
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
    option("--slo-attainment", 0.0, "Exit code 1 if a smaller fraction of requests meets the SLO")
    option("--api-key", "", "Sent as a bearer token if not empty", is_secret=True)
    option("--admin-url", "http://127.0.0.1:8081", "The gateway's admin port, to compare; not asked if empty")
    parser.set_defaults(stop_timeout=STOP_TIMEOUT_S)


# Short common words, one token each in the usual vocabularies.
_WORDS = (  # noqa: SIM905 - a text of words is easier to read than a list
    "time year day man world life hand part child eye place work week case point home water room "
    "mother area money story fact month lot right study book word issue side kind head house friend "
    "father power hour game line end member law car city name team minute idea body back parent face "
    "door health art war party result change morning reason girl guy moment air force tide gate"
).split()

_ASK = "Write a long story with these words:"

_ASK_TOKENS = 8


def prompt(tokens: int, rng: random.Random) -> str:
    """A prompt of about ``tokens`` tokens; what the server counted is in the usage it reports."""
    # The first word differs as well: a cached prefix would make the time to the first token look short.
    return " ".join(
        [f"({rng.getrandbits(32):x})", _ASK, *rng.choices(_WORDS, k=max(1, tokens - _ASK_TOKENS))]
    )
