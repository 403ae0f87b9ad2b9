"""The command ``tidegate``: its commands, global options, and one-line errors instead of tracebacks."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

import click
import msgspec

from policy.errors import TidegateError
from store.state_dir import StateDir, default_root
from tidegate.exit_codes import MEANINGS, ExitCode, exit_of

# The module and the summary of each command. A module is imported when its command runs, so that `--help`
# and `up` do not import httpx and rich.
_COMMANDS = {
    "up": ("deployment.up_run_down", "Start a deployment in the background; return when it is ready."),
    "serve": ("deployment.vllm_serve", "Serve a model with the flags of `vllm serve`."),
    "run": ("deployment.up_run_down", "Run a deployment in the foreground until SIGINT or SIGTERM."),
    "gateway": (
        "deployment.additional_gateway_host",
        "Run a gateway on a further host, for the controller of another.",
    ),
    "controller": ("deployment.controller", "Run one of several controllers, which elect their leader."),
    "down": ("deployment.up_run_down", "Stop the deployment."),
    "status": ("fleet.status", "Show processes, models and replicas."),
    "top": ("fleet.top", "Show models, replicas and decisions live."),
    "logs": ("deployment.logs", "Print the logs of processes."),
    "explain": ("fleet.explain", "Explain a model's replica count: SLO, metrics, policy, limits."),
    "scale": ("fleet.manual_overrides", "Override a model's replica count, or end the override."),
    "mode": ("fleet.manual_overrides", "Override a model's mode (topology), or end the override."),
    "adapters": ("fleet.adapters", "Show, add, replace, split, roll back or remove LoRA adapters."),
    "check": ("deployment.check_and_apply", "Validate a deployment file."),
    "profile": (
        "fleet.process_profiler",
        "Write a flame graph of a gateway worker, the controller or a replica.",
    ),
    "import": ("deployment.import_file", "Write a deployment file from LiteLLM's or production-stack's."),
    "render": ("deployment.render", "Render a deployment file as Kubernetes manifests."),
    "doctor": ("deployment.doctor", "Check this machine: GPUs, memory, disk, ports, limits, packages."),
    "apply": ("deployment.check_and_apply", "Show what a deployment file would change, and apply it."),
    "tenants": ("tenancy.tenants", "Create, list, change and delete tenants."),
    "keys": ("tenancy.keys", "Create, list, rotate and revoke API keys of tenants."),
    "admin-keys": ("tenancy.keys", "Create, list and revoke keys for the admin port."),
    "usage": ("tenancy.usage", "Show what tenants used, and what it costs."),
    "audit": ("tenancy.audit", "Show who changed what, and when."),
    "simulate": ("simulation.simulate", "Replay a trace on a simulated deployment."),
    "replay": (
        "simulation.replay_and_capture",
        "Replay a trace against an endpoint, or capture live traffic as a trace.",
    ),
    "calibrate": (
        "simulation.calibrate",
        "Fit a performance model to live replicas, or check the simulator against a replay.",
    ),
    "plan": ("simulation.plan", "Find the fewest GPUs that meet the SLO, now and as the load grows."),
    "bench": ("simulation.bench", "Compare policies on simulated replicas."),
}
# A keyword of Python is no name of a function.
_FUNCTIONS = {"import": "import_file", "admin-keys": "admin_keys"}

_EPILOG = "Exit codes: " + "; ".join(f"{code.value} {text}" for code, text in MEANINGS.items()) + "."


class _LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"tidegate.commands.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, _FUNCTIONS.get(cmd_name, cmd_name))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


def _version(ctx: click.Context, _parameter: click.Parameter, requested: bool) -> None:
    if not requested:
        return
    try:
        click.echo(f"tidegate {importlib.metadata.version('tidegate')}")
    except importlib.metadata.PackageNotFoundError:
        click.echo("tidegate (not installed, running from a checkout)")
    ctx.exit()


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="TIDEGATE_STATE_DIR",
    help="Directory for the secret, process ids, logs and decisions; one per deployment.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
@click.pass_context
def group(ctx: click.Context, state_dir: Path | None) -> None:
    """Serve language models behind one OpenAI-compatible gateway."""
    ctx.obj = StateDir(state_dir.expanduser().resolve() if state_dir else default_root())


def main() -> None:
    """The entry point; an expected failure is a message on standard error and an exit code."""
    try:
        group(standalone_mode=False, prog_name="tidegate")
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.exceptions.Abort:
        sys.exit(ExitCode.INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader has exited, as in `tidegate logs | head`.
        sys.stderr.close()
        sys.exit(ExitCode.OK)
    except msgspec.MsgspecError as error:
        click.echo(f"tidegate: a response or state file of another Tidegate version: {error}", err=True)
        sys.exit(ExitCode.FAILED)
    except (TidegateError, OSError) as error:
        click.echo(f"tidegate: {error}", err=True)
        sys.exit(exit_of(error))
