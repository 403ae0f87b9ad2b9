"""docs/cli.md has every command and option; `python -m tests.test_cli_reference` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator

import click

from tests.generated_page import GeneratedPage
from tidegate.cli import group
from tidegate.exit_codes import MEANINGS

PAGE = GeneratedPage("cli.md", "## Exit codes\n")


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """``command`` and all commands below it."""
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            with click.Context(below, info_name=name, parent=context) as inner:
                yield from commands(below, inner)


def reference() -> str:
    """The generated part of the page."""
    codes = "".join(f"| {code.value} | {text} |\n" for code, text in MEANINGS.items())
    text = f"\n| Code | Meaning |\n|---|---|\n{codes}"
    with click.Context(group, info_name="tidegate") as root:
        for command, context in commands(group, root):
            text += f"\n## `{context.command_path}`\n\n{_cell(command.help or '')}\n"
            usage = " ".join(command.collect_usage_pieces(context))
            text += f"\n```text\n{context.command_path} {usage}\n```\n"
            text += _table("Command", _below(command, context))
            text += _table("Option", _options(command, context))
    return text


def _below(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield name, below.get_short_help_str(200)


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in command.params:
        record = parameter.get_help_record(context)
        # Arguments are explained in the command's own text.
        if record is not None and record[1]:
            yield record


def _table(head: str, rows: Iterator[tuple[str, str]]) -> str:
    body = "".join(f"| `{name}` | {_cell(text)} |\n" for name, text in rows)
    return f"\n| {head} | Meaning |\n|---|---|\n{body}" if body else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")


def test_the_page_has_every_command_and_option() -> None:
    assert PAGE.generated == reference()


if __name__ == "__main__":
    PAGE.write(reference())
