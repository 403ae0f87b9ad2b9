"""Options, arguments and parameter types that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# An existing file.
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

file_argument = click.argument("file", type=FILE)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


class OutputFile(click.Path):
    """A file to write, in an existing folder."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.absolute().parent.is_dir():
            self.fail(f"{path}: expected a file in a folder that exists", param, ctx)
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            self.fail(f"{path}: expected a file that can be written", param, ctx)
        return path


class FiniteFloat(click.FloatRange):
    """A finite number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class CommaSeparated(click.ParamType[tuple[T, ...]]):
    """Values separated by commas; ``parse`` raises :class:`ValueError` for an invalid one."""

    def __init__(self, name: str, parse: Callable[[str], T], expected: str) -> None:
        self.name = name
        self._parse = parse
        self._expected = expected

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[T, ...]:
        if isinstance(value, tuple):
            return value
        values: dict[T, None] = {}
        for text in str(value).split(","):
            try:
                values[self._parse(text)] = None
            except ValueError:
                self.fail(f"{text!r}: expected {self._expected}, separated by commas", param, ctx)
        return tuple(values)


class Url(click.ParamType[str]):
    """An http or https URL."""

    name = "url"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            url = urlsplit(value)
        except ValueError:  # a bracket without the other
            url = urlsplit("")
        if url.scheme not in ("http", "https") or url.hostname is None:
            self.fail(f"{value!r} is not a URL such as http://127.0.0.1:8080", param, ctx)
        return value


def number_between(low: float, high: float) -> Callable[[str], float]:
    """A parser of numbers above ``low`` and up to ``high``."""

    def parse(text: str) -> float:
        number = float(text)
        if not low < number <= high:
            raise ValueError
        return number

    return parse


key_option = click.option(
    "--key", default="", envvar="TIDEGATE_API_KEY", show_envvar=True, help="API key for the endpoint."
)


def number_option(names: str, number: click.ParamType[Any], default: float | None, note: str) -> Decorator:
    """An option with a numeric default that the help shows; ``names`` are separated by spaces."""
    return click.option(*names.split(), type=number, default=default, show_default=True, help=note)


def plot_option(content: str) -> Decorator:
    return click.option("--plot", type=OutputFile(), help=f"Write {content} to this file, as SVG.")


def seed_option(default: int | None = 0, note: str = "") -> Decorator:
    return number_option("--seed", click.IntRange(0, 2**63 - 1), default, f"Random seed{note}.")


def trace_option(*, required: bool) -> Decorator:
    return click.option(
        "--trace", required=required, type=FILE, help="A published or captured trace, or a workload in YAML."
    )


def rate_option(command: Callable[..., Any]) -> Callable[..., Any]:
    note = "Multiply the request rate by this factor."
    return number_option("--rate", FiniteFloat(1e-6, 1e6), 1.0, note)(command)


def slice_options(order: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--from-s`` and ``--to-s``, in seconds of the trace ``before`` or ``after`` its rate is multiplied."""
    to_s = click.option(
        "--to-s", type=FiniteFloat(0, 1e12), callback=_after_from,
        help=f"Stop before this second of the trace, {order} --rate.",
    )  # fmt: skip
    from_s = click.option(
        "--from-s", type=FiniteFloat(0, 1e12), default=0.0, is_eager=True, show_default=True,
        help=f"Start at this second of the trace, {order} --rate.",
    )  # fmt: skip
    return lambda command: from_s(to_s(command))


def _after_from(ctx: click.Context, _parameter: click.Parameter, to_s: float | None) -> float | None:
    if to_s is not None and to_s <= ctx.params["from_s"]:
        raise click.BadParameter(f"{to_s:g} is not after --from-s {ctx.params['from_s']:g}")
    return to_s
