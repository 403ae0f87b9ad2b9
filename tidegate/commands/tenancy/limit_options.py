"""The options of limits and permissions that tenants and keys share, and how lists show them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click

from policy.config.tenancy import AccessPolicy, Feature, LimitName
from tidegate.commands.options import Decorator
from tidegate.commands.units import clock

# The field of each option; an empty text removes the limit.
_NUMBERS = {
    "rpm_limit": "Requests per minute.",
    "tpm_limit": "Tokens per minute, of prompts and answers.",
    "max_parallel_requests": "Requests in flight.",
    "max_tokens": "The longest answer, in tokens.",
}
_LISTS = {
    "models": "Model that it may use, repeatable; default: all.",
    "adapters": "Adapter that it may use, as NAME or MODEL:NAME, repeatable; default: all.",
}


def access_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options for every field of :class:`policy.config.tenancy.AccessPolicy`; the command gets ``access``."""

    @functools.wraps(command)
    def with_access(*args: Any, **given: Any) -> None:
        access = {name: given.pop(name) for name in AccessPolicy.__struct_fields__}
        set_ = {name: value for name, value in access.items() if value not in (None, ())}
        command(*args, access=set_, **given)

    collected: Callable[..., None] = with_access
    for decorate in reversed(_options()):
        collected = decorate(collected)
    return collected


def _options() -> list[Decorator]:
    money = "Money per --budget-duration, or in all."
    features = click.Choice([feature.value for feature in Feature])
    return [
        *(click.option(_flag(name), type=click.IntRange(1), help=text) for name, text in _NUMBERS.items()),
        click.option("--max-budget", type=click.FloatRange(0), help=money),
        click.option("--budget-duration", metavar="PERIOD", help="Such as 12h, 7d or 1mo."),
        click.option(
            "--dry-run", multiple=True, type=click.Choice([limit.value for limit in LimitName]),
            help="Limit to count and show without enforcing it, repeatable.",
        ),
        *(click.option(_flag(name)[:-1], name, multiple=True, help=text) for name, text in _LISTS.items()),
        click.option(
            "--feature", "features", multiple=True, type=features,
            help="Feature that requests may use, repeatable; default: all.",
        ),
        click.option("--metadata", type=_object, metavar="JSON", help="A JSON object of yours."),
    ]  # fmt: skip


def limits_of(access: AccessPolicy) -> str:
    """The limits and permissions that are set, in one line."""
    parts = []
    for name in AccessPolicy.__struct_fields__:
        value = getattr(access, name)
        if value is None or value in ((), {}) or name == "metadata":
            continue
        text = ",".join(map(str, value)) or "none" if isinstance(value, tuple) else f"{value}"
        parts.append(f"{name}={text}")
    return " ".join(parts) or "-"


def when(text: str | None) -> dict[str, Any]:
    """The members of a request that say when a key expires: a date, an instant, or a duration."""
    if text is None:
        return {}
    try:
        then = datetime.fromisoformat(text)
    except ValueError:
        return {"duration": text}
    return {"expires": (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()}


def date(at: float | None, now: float) -> str | None:
    """An instant for a table."""
    return None if at is None else clock(at, now)


expires_option = click.option(
    "--expires", metavar="WHEN", help="A duration such as 30d, a date (UTC), or an instant with its zone."
)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise click.BadParameter(f"got {text!r}, expected a JSON object")
    return value
