"""``check`` and ``apply``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from policy.config.deployment import Deployment, ModelSpec
from policy.config.port_conflicts import is_loopback
from policy.config.shared_gpus import gpu_group_of
from policy.deployment_file.diff import ChangeEffect, ConfigChange, diff
from policy.deployment_file.parse import parse
from policy.errors import ConfigError, TidegateError
from policy.scaling.policies.registry import choose
from serve.autoscaler.custom_policy_check import check_custom_policies, check_custom_policy
from serve.autoscaler.policies import policies_for, policies_of
from store.state_dir import StateDir
from store.tls_files import days_left, every_port_with_tls
from store.watched_files import signature_of
from tidegate import deployment_file
from tidegate.commands.deployment.rollout_progress import follow
from tidegate.commands.deployment_context import controller_client
from tidegate.commands.options import as_json, file_argument
from tidegate.commands.terminal import console, print_json, table, warn
from tidegate.commands.units import duration, latency
from tidegate.exit_codes import ExitCode
from tidegate.redaction import redact
from tidegate.supervisor.control_socket import SupervisorClient
from tidegate.supervisor.preflight import check_keys

POLL_S = 0.2

_EFFECTS = {
    ChangeEffect.LIVE: "immediately",
    ChangeEffect.NEW_GENERATION: "new revision: ready before the old one drains",
    ChangeEffect.RESTART: "only after down and up",
}


def file_changes(path: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Yield once for the file as it is, and again after each save.

    Two equal polls in a row make a save, because editors write in pieces or replace the file. Polling works
    on every file system and through renames.
    """
    reported = previous = None
    while True:
        current = signature_of(path)
        if current is not None and current == previous and current != reported:
            reported = current
            yield
        previous = current
        sleep(POLL_S)


@click.command(help="Validate FILE. An error names the path, the value and what was expected.")
@file_argument
@as_json
@click.pass_obj
def check(state: StateDir, file: Path, as_json: bool) -> None:
    try:
        deployment = deployment_file.load(file).deployment
        for path, files in every_port_with_tls(deployment).items():
            days_left(files, path, time.time())
        check_keys(deployment, state)
        scaling = {spec.name: _scaling(spec) for spec in deployment.models}
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"ok": False, "path": error.path, "value": error.value, "expected": error.expected})
        sys.exit(ExitCode.INVALID)
    gateway = deployment.gateway
    if gateway.allow_unauthenticated and not (is_loopback(gateway.host) or deployment.tenants):
        warn("tidegate: gateway.allow_unauthenticated: other machines may use the API without a key")
    for spec in deployment.models:
        drain_s, queue_s = spec.control.mode.drain_timeout_s, deployment.gateway.queue_timeout_s
        if gpu_group_of(spec) is not None and drain_s + (spec.sim.wake_s or 0.0) > queue_s:
            warn(
                f"tidegate: models[{spec.name}].control.mode.drain_timeout_s = {drain_s:g} and a wake-up"
                f" exceed gateway.queue_timeout_s = {queue_s:g}: the modes share GPUs, so no switch is made"
                " while a stream is expected to run that long, and requests that wait for one are refused"
            )
    models = [
        {"name": spec.name, "engine": spec.engine, "mode": spec.first_mode, "decides": scaling[spec.name]}
        for spec in deployment.models
    ]
    if as_json:
        print_json({"ok": True, "models": models})
        return
    for model in models:
        first = f", starts in {model['mode']}" if model["mode"] else ""
        click.echo(f"{model['name']}: engine {model['engine']}{first}; {model['decides']}")
    click.echo(f"{file} is valid.")


def _scaling(spec: ModelSpec) -> str:
    """The policy that scales a model, its bounds and its SLO; raises :class:`ConfigError` if invalid."""
    if not spec.is_scaled:
        return "not scaled: external servers"
    bounds = " or ".join(
        f"{name} x {mode.bounds.min}"
        + (f" to {mode.bounds.max}" if mode.bounds.max > mode.bounds.min else "")
        for name, mode in spec.modes.items()
    )
    chosen = policies_of(spec)
    policies_for(spec.name, chosen, warn)
    check_custom_policy(spec)
    control = spec.control
    scaled = f"scaled by {choose('', chosen.live).label}: {bounds}"
    if control.guard.dry_run:
        asleep = any(not mode.bounds.min for mode in spec.modes.values())
        scaled += f" (guard.dry_run: decisions are only logged{'; no wake from zero' if asleep else ''})"
    if chosen.shadow is not None:
        scaled += f"; shadow policy {choose('', chosen.shadow).label}"
    slo = [
        f"{name} p95 {latency(limit)}"
        for name, limit in (("TTFT", control.slo.ttft_p95_s), ("ITL", control.slo.itl_p95_s))
        if limit is not None
    ]
    return f"{scaled}; SLO: {', '.join(slo)}" if slo else scaled


@click.command(help="Show what FILE would change in the running deployment, and apply all of it or nothing.")
@file_argument
@click.option("--dry-run", is_flag=True, help="Only show the changes.")
@click.option("--watch", is_flag=True, help="Apply FILE again after each save, until Ctrl-C.")
@click.option(
    "--wait", is_flag=True,
    help="Return once each model is ready; the exit code says whether one was rolled back.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", metavar="DURATION", type=duration,
    help="Longest --wait, e.g. 90s, 30m or 2h; default: twice the longest control.start_timeout_s.",
)  # fmt: skip
@as_json
@click.pass_obj
def apply(
    state: StateDir,
    *,
    file: Path,
    dry_run: bool,
    watch: bool,
    wait: bool,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    if wait and (watch or dry_run):
        raise click.UsageError("--wait is for one apply: leave out --watch and --dry-run")
    if timeout_s is not None and not wait:
        raise click.UsageError("--timeout is that of --wait")
    client = SupervisorClient(state)
    if watch:
        client.status()  # fails if nothing is running
        _watch(client, file, dry_run, as_json)
    elif not _apply(client, file, dry_run, as_json):
        sys.exit(ExitCode.REFUSED)
    elif wait:
        _wait(state, parse(client.status().document), timeout_s, as_json)


def _wait(state: StateDir, deployment: Deployment, timeout_s: float | None, as_json: bool) -> None:
    """Follow the models that Tidegate deploys until they are ready; exits with what came of it."""
    deployed = {spec.name: spec for spec in deployment.models if spec.is_scaled}
    if not deployed:
        return
    if timeout_s is None:
        timeout_s = 2 * max(spec.control.start_timeout_s for spec in deployed.values())
    outcome, models = follow(controller_client(state), deployed, timeout_s, warn if as_json else click.echo)
    if as_json:
        print_json({"outcome": outcome.name.lower(), "models": models})
    if outcome is ExitCode.FAILED:
        warn(f"tidegate: not ready after {timeout_s:g} s; it goes on (see tidegate status)")
    if outcome is not ExitCode.OK:
        sys.exit(outcome)


def _watch(client: SupervisorClient, file: Path, dry_run: bool, as_json: bool) -> None:
    """Apply each save; after a refused one the running deployment stays as it is."""
    with contextlib.suppress(KeyboardInterrupt):
        for _ in file_changes(file):
            if not as_json:
                click.echo(f"{time.strftime('%H:%M:%S')} {file}")
            try:
                applied = _apply(client, file, dry_run, as_json)
            except TidegateError as error:
                applied = False
                warn(f"tidegate: {error}")
            if not applied:
                warn("The running deployment is unchanged.")


def _apply(client: SupervisorClient, file: Path, dry_run: bool, as_json: bool) -> bool:
    """Show the changes and apply them; returns whether none was refused."""
    document = deployment_file.load(file)
    check_custom_policies(document.deployment)
    changes = diff(parse(client.status().document), document.deployment)
    refused = [change for change in changes if change.effect is ChangeEffect.RESTART]
    # Sent without changes too: the controller then retries what failed and reads weight directories again.
    applied = not refused and not dry_run
    if not as_json:
        _print_changes(changes)
    if applied:
        client.apply(document.raw)
    if as_json:
        masked = [{**msgspec.to_builtins(change), **_masked(change)} for change in changes]
        print_json({"applied": applied, "changes": masked})
    elif applied and changes:
        click.echo("Applied.")
    for change in refused:
        before, after = _masked(change).values()
        warn(f"tidegate: {change.path}: got {after!r}, expected {before!r} (or down and up: {change.why})")
    return not refused


def _print_changes(changes: tuple[ConfigChange, ...]) -> None:
    if not changes:
        click.echo("No changes.")
        return
    console().print(
        table(
            changes,
            ("path", lambda change: change.path),
            ("before", lambda change: _text(_masked(change)["before"])),
            ("after", lambda change: _text(_masked(change)["after"])),
            ("takes effect", _effect),
        )
    )
    for why in dict.fromkeys(
        change.why for change in changes if change.effect is ChangeEffect.NEW_GENERATION
    ):
        if why:
            click.echo(why)


def _effect(change: ConfigChange) -> str:
    # Which of the two revisions goes first is said below the table then.
    return (
        "new revision"
        if change.effect is ChangeEffect.NEW_GENERATION and change.why
        else _EFFECTS[change.effect]
    )


def _masked(change: ConfigChange) -> dict[str, Any]:
    return {"before": redact(change.before, change.path), "after": redact(change.after, change.path)}


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()
