"""``doctor``: checks of this machine and of a deployment on it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import click
from rich.text import Text

from policy.deployment_file.parse import parse
from policy.errors import TargetError, Unreachable
from policy.types import ReplicaPhase
from policy.wire.controller_reports import GpuReport
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tidegate import deployment_file
from tidegate.commands.deployment_context import controller_client
from tidegate.commands.options import FILE, as_json
from tidegate.commands.terminal import console, print_json, table
from tidegate.commands.units import plural
from tidegate.doctor.check_suite import CheckContext, run_checks
from tidegate.doctor.finding import Finding, Severity
from tidegate.exit_codes import ExitCode
from tidegate.supervisor.control_socket import SupervisorClient

_COLORS = {
    Severity.ERROR: "red",
    Severity.WARNING: "yellow",
    Severity.OK: "green",
    Severity.NOT_APPLICABLE: "dim",
}


@click.command(
    help="Check this machine: GPUs and driver, memory, disk, ports, limits, Ray, certificates, packages. Each"
    " line says what was found; errors and warnings say what to do.\n\nWith FILE for that deployment,"
    " otherwise for the one that runs or ran last. The exit code is 6 if there is an error."
)
@click.argument("file", type=FILE, required=False)
@as_json
@click.pass_obj
def doctor(state: StateDir, file: Path | None, as_json: bool) -> None:
    findings = run_checks(_subject(state, file))
    healthy = not any(finding.level is Severity.ERROR for finding in findings)
    if as_json:
        print_json({"ok": healthy, "findings": findings})
    else:
        console().print(
            table(
                findings,
                ("result", lambda each: Text(each.level, style=_COLORS[each.level])),
                ("check", lambda each: Text(each.check, style="bold")),
                ("found", _text),
            )
        )
        counts = Counter(finding.level for finding in findings)
        click.echo(
            f"{plural(counts[Severity.ERROR], 'error')}, {plural(counts[Severity.WARNING], 'warning')};"
            f" {counts[Severity.OK]} ok, {counts[Severity.NOT_APPLICABLE]} not applicable"
        )
    if not healthy:
        sys.exit(ExitCode.PRECONDITION)


def _text(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.advice:
        text.append(f"\n-> {finding.advice}", style="bold")
    return text


def _subject(state: StateDir, file: Path | None) -> CheckContext:
    try:
        runs = SupervisorClient(state).status()
    except Unreachable:
        runs = None
    if file is not None:
        raw: object = deployment_file.load(file).raw
    else:
        raw = runs.document if runs is not None else state.load(state.deployment_path, dict[str, object])
    return CheckContext(
        state=state,
        at=time.time(),
        deployment=None if raw is None else parse(raw),
        raw=raw,
        runs=runs,
        running=None if runs is None else parse(runs.document),
        reports=_reports(state),
    )


def _reports(state: StateDir) -> dict[str, GpuReport] | None:
    try:
        return reports_of_awake(controller_client(state))
    except (Unreachable, TargetError):
        return None


def reports_of_awake(client: ControllerClient) -> dict[str, GpuReport]:
    """The reports of replicas on their GPUs; another one has those of one that sleeps."""
    reports = client.gpus()
    asleep = {each.id for each in client.fleet().replicas if each.state is ReplicaPhase.ASLEEP}
    return {name: report for name, report in reports.items() if name not in asleep}
