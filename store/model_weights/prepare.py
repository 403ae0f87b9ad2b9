"""Make a model's weights available as a local directory.

``python -m store.model_weights prepare --source S`` prints progress as JSON lines, and last either
``{"step": "ready", "path": ..., "digest": ...}`` or ``{"error": ...}`` with exit status 1.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import msgspec

from policy.deployment_file.parse import parse
from policy.errors import ModelUnavailable, TidegateError
from store.model_weights.directory_source import prepare_directory
from store.model_weights.hub_source import ID, prepare_hub
from store.model_weights.package_source import prepare_package
from store.progress_report import PreparedWeights, Report

PACKAGE = "package:"


class WeightsOrigin(StrEnum):
    """Where weights come from."""

    PACKAGE = "package"
    DIRECTORY = "directory"
    HUB = "hub"


def origin(source: str) -> WeightsOrigin:
    """The kind of ``source``: ``package:NAME``, a local directory (prefix ``/``, ``./``, ``../`` or ``~``, or
    it exists), or a Hugging Face id ``ORG/NAME[@REVISION]``; raises :class:`policy.errors.ModelUnavailable`.
    """
    if source.startswith(PACKAGE):
        return WeightsOrigin.PACKAGE
    if re.match(r"(/|\.\.?(/|$)|~)", source) or (source and Path(source).expanduser().is_dir()):
        return WeightsOrigin.DIRECTORY
    if ID.fullmatch(source):
        return WeightsOrigin.HUB
    raise ModelUnavailable(
        f"{source!r} is not package:NAME, a local directory or a Hugging Face id (ORG/NAME)"
    )


def prepare(source: str, *, token_file: str | None, progress: Report) -> PreparedWeights:
    """The directory of ``source``, fetched, converted and verified; ``token_file`` is for the hub.

    Blocks; safe in several processes at once. Raises :class:`policy.errors.ModelUnavailable`.
    """
    kind = origin(source)
    if kind is WeightsOrigin.PACKAGE:
        return prepare_package(source.removeprefix(PACKAGE), report=progress)
    if kind is WeightsOrigin.DIRECTORY:
        return prepare_directory(Path(source).expanduser().resolve())
    return prepare_hub(source, token_file=token_file, report=progress)


def _print(line: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _wanted(arguments: argparse.Namespace) -> tuple[str, str | None]:
    if arguments.source is not None:
        return arguments.source, arguments.token_file
    try:
        document = msgspec.json.decode(Path(arguments.deployment_json).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ModelUnavailable(f"{arguments.deployment_json} cannot be read: {error}") from error
    spec = parse(document).model(arguments.model)
    return spec.source, spec.token_file


def _terminated(_signal: int, _frame: object) -> NoReturn:
    # Unwinds, so that the conversion's child ends and the partial directory is deleted.
    raise SystemExit(143)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m store.model_weights", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("prepare", help="print progress, then the directory and its digest")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--source", help="package:NAME, a directory or ORG/NAME[@REVISION]")
    which.add_argument("--deployment-json", help="an applied deployment document; needs --model")
    command.add_argument("--token-file", help="holds a Hugging Face access token")
    command.add_argument("--model", help="a model of the deployment")
    arguments = parser.parse_args(argv)
    if arguments.deployment_json is not None and arguments.model is None:
        parser.error("--deployment-json needs --model")
    try:
        source, token_file = _wanted(arguments)
        prepared = prepare(source, token_file=token_file, progress=_print)
    except TidegateError as error:
        _print({"error": str(error)})
        return 1
    _print({"step": "ready", "path": str(prepared.path), "digest": prepared.digest})
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main())
