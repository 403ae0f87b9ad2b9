"""The command ``tidegate``: names, global options, and errors as one line instead of a traceback."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

import click
import msgspec

from policy.errors import TidegateError
from store.state_dir import StateDir, default_root
from tidegate.exit_codes import MEANINGS, Exit, exit_of

# Where each command lives. A module is imported when its command runs, so that `--help` and `up`
# do not pay for httpx and rich.
_COMMANDS = {
    "up": ("deployment.up_run_down", "Start detached, and return when every model answers."),
    "run": ("deployment.up_run_down", "Run in the foreground until SIGINT or SIGTERM."),
    "down": ("deployment.up_run_down", "Stop what was started, and nothing else."),
    "status": ("fleet.status", "Show processes, models and replicas."),
    "logs": ("deployment.logs", "Print the log of one part, or of all."),
    "explain": ("fleet.explain", "Say why a model has the replicas that it has."),
    "scale": (
        "fleet.scale_mode",
        "Set how many replicas a model has in its current mode, or let load decide.",
    ),
    "mode": (
        "fleet.scale_mode",
        "Switch a model between single-large and multi-replica, or let load decide.",
    ),
    "adapters": ("fleet.adapters", "Show, add, replace, split, roll back or remove LoRA adapters."),
    "check": ("deployment.check_apply", "Validate a deployment document."),
    "apply": ("deployment.check_apply", "Show what a document would change, and apply it."),
    "keys": ("deployment.keys", "Make API keys for tenants."),
    "simulate": ("simulation.simulate", "Replay a trace on a deployment before anything runs."),
    "replay": ("simulation.replay", "Replay a trace against an endpoint, or capture what a gateway serves."),
    "calibrate": (
        "simulation.calibrate",
        "Fit an engine model to live replicas, or hold the twin against a replay.",
    ),
    "plan": (
        "simulation.plan",
        "Find the fewest devices that meet the objective, now and as the load grows.",
    ),
    "bench": ("simulation.bench", "Measure policies on the simulated engine, beside others."),
}

_EPILOG = "Exit codes: " + "; ".join(f"{code.value} {text}" for code, text in MEANINGS.items()) + "."


class _LazyGroup(click.Group):
    """A group that knows its commands' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"tidegate.commands.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


def _version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    try:
        click.echo(f"tidegate {importlib.metadata.version('tidegate')}")
    except importlib.metadata.PackageNotFoundError:
        click.echo("tidegate, a checkout that is not installed")
    ctx.exit()


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="TIDEGATE_STATE_DIR",
    help="Where secrets, process ids and logs are kept; one directory per deployment.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
@click.pass_context
def group(ctx: click.Context, state_dir: Path | None) -> None:
    """Serve language models behind one OpenAI-compatible gateway."""
    ctx.obj = StateDir(state_dir.expanduser().resolve() if state_dir else default_root())


def main() -> None:
    """The entry point; every expected failure is one message on standard error and an exit code."""
    try:
        group(standalone_mode=False, prog_name="tidegate")
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.exceptions.Abort:
        sys.exit(Exit.INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader went away (`tidegate logs | head`); nothing is left to say to it.
        sys.stderr.close()
        sys.exit(Exit.OK)
    except msgspec.MsgspecError as error:
        click.echo(f"tidegate: an answer or a state file of another version of Tidegate: {error}", err=True)
        sys.exit(Exit.FAILED)
    except (TidegateError, OSError) as error:
        click.echo(f"tidegate: {error}", err=True)
        sys.exit(exit_of(error))
