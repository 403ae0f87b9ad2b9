"""``up``, ``run`` and ``down``: start and stop a deployment, with its progress."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import click

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.errors import PreconditionFailed, Unreachable
from policy.types import Runner
from serve.autoscaler.custom_policy_check import check_custom_policies
from store.json_log_format import line
from store.log_file import RotatingLog
from store.os_process import find
from store.state_dir import StateDir
from tidegate import deployment_file
from tidegate.commands.options import FILE, file_argument
from tidegate.commands.terminal import warn
from tidegate.exit_codes import ExitCode
from tidegate.supervisor.children import ROOT
from tidegate.supervisor.control_socket import SupervisorClient
from tidegate.supervisor.deployment_file_watch import watch_file
from tidegate.supervisor.orphan_cleanup import remove_orphans
from tidegate.supervisor.progress_events import ProgressEvent, ProgressLog
from tidegate.supervisor.readiness import admin_url, client_url

_QUESTION = "What is the capital of France?"
_POLL_S = 0.02
# Between the supervisor's last event and its exit.
_EXIT_S = 5.0
# A file with the deployment's secret, such as a mounted Kubernetes secret: pods of one deployment share it.
_SECRET_FILE = "TIDEGATE_SECRET_FILE"  # noqa: S105 - a name
# Events that are more than information, by their level in the log.
_LEVELS = {"note": "warning", "failed": "error"}

no_ray_option = click.option("--no-ray", is_flag=True, help="Run replicas as child processes, without Ray.")
timeout_option = click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds until ready; default: the largest control.start_timeout_s, and 10 for external servers.",
)


watch_option = click.option(
    "--watch", is_flag=True, help="Apply FILE again when it changes, such as a mounted ConfigMap."
)
secret_option = click.option(
    "--secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A copy of the file `secret` of its state directory.",
)


class EventPrinter:
    """Prints each event as a line; on a terminal a step in progress overwrites its own line."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open = False

    def __call__(self, event: ProgressEvent) -> None:
        step = f"{event.step:<12}"
        if event.kind == "step":
            done = "" if event.fraction is None else f" {event.fraction:.0%}"
            self._line(f"  {step}{event.message}{done}", final=not self._terminal)
        elif event.kind == "done":
            self._line(f"{click.style('✓', fg='green')} {step}{event.message}", final=True)
        elif event.kind == "ended":
            self._line(f"  ended {event.step} ({event.message})", final=True)
        elif event.kind == "failed":
            self._line("", final=False)
            warn(f"tidegate: {event.message}")
        elif event.kind != "ready":
            self._line(f"  {event.message}", final=True)

    def _line(self, text: str, *, final: bool) -> None:
        if self._open:
            click.echo("\r\x1b[K", nl=False)
        click.echo(text[:200] if not final else text, nl=final)
        self._open = not final and bool(text)


def welcome(deployment: Deployment) -> str:
    """Where it is, and a first request with ``curl`` and in Python, ready to paste."""
    base = client_url(deployment.gateway)
    page = admin_url(deployment.gateway)
    spec = next((spec for spec in deployment.models if spec.runner is Runner.GENERATE), None)
    head = f"\nTidegate is ready at {base}/v1\nPage: {page}/ (its token: `tidegate status`)\n"
    if spec is None:
        return head
    messages = [{"role": "user", "content": _QUESTION}]
    body = {"model": spec.name, "messages": messages, "temperature": 0, "max_tokens": 32}
    key, header = "unused", ""
    if deployment.tenants:
        key = f"KEY-OF-{deployment.tenants[0].name}"
        header = f"\n  -H 'Authorization: Bearer {key}' \\"
    return f"""{head}
curl {base}/v1/chat/completions \\{header}
  -H 'Content-Type: application/json' \\
  -d '{json.dumps(body)}'

from openai import OpenAI
client = OpenAI(base_url="{base}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="{spec.name}", messages=[{{"role": "user", "content": "{_QUESTION}"}}], temperature=0, max_tokens=32
)
print(answer.choices[0].message.content)
"""


@click.command(
    help="Start FILE in the background, and return when every model is ready."
    "\n\nWithout FILE: the deployment file that was applied last."
)
@click.argument("file", type=FILE, required=False)
@click.option("--foreground", is_flag=True, help="Same as `tidegate run`.")
@no_ray_option
@timeout_option
@click.pass_obj
def up(state: StateDir, file: Path | None, foreground: bool, no_ray: bool, timeout_s: float | None) -> None:
    path = _spec_path(state, file)
    document = deployment_file.load(path, ray=not no_ray)
    if foreground:
        sys.exit(_run(state, document, no_ray, timeout_s, watched=None))
    client = SupervisorClient(state)
    try:
        running = client.status()
    except Unreachable:
        sys.exit(_start_detached(state, path, document, no_ray, timeout_s))
    if parse(running.document) != document.deployment:
        warn(f"tidegate: already running at {running.endpoint} with another deployment file")
        warn(f"To change the running deployment: tidegate apply {path}")
        sys.exit(ExitCode.REFUSED)
    if running.phase == "ready":
        click.echo(f"Tidegate is already running at {running.endpoint}.")
        return
    sys.exit(_watch(client.follow(), document))


@click.command(help="Run FILE in the foreground until SIGINT or SIGTERM (systemd, containers).")
@file_argument
@no_ray_option
@timeout_option
@watch_option
@click.pass_obj
def run(state: StateDir, file: Path, no_ray: bool, timeout_s: float | None, watch: bool) -> None:
    document = deployment_file.load(file, ray=not no_ray)
    sys.exit(_run(state, document, no_ray, timeout_s, watched=file if watch else None))


@click.command(help="Stop what `up` or `run` started, and nothing else. No error when nothing is running.")
@click.pass_obj
def down(state: StateDir) -> None:
    printer = EventPrinter()
    client = SupervisorClient(state)
    try:
        supervisor = client.status().pid
        for event in client.stop():
            printer(event)
            if event.kind in ("stopped", "failed"):
                _wait_for_exit(supervisor)
                # A start that failed meanwhile does not make the stop fail.
                sys.exit(event.exit_code if event.kind == "stopped" else ExitCode.OK)
    except Unreachable:
        pass
    # No supervisor answers: it was killed, or it hangs. Only the processes that it recorded are ended.
    if not remove_orphans(state, click.echo):
        click.echo("Nothing is running.")


def _wait_for_exit(pid: int) -> None:
    """Wait for the supervisor, which has sent its last event and exits within milliseconds."""
    deadline = time.monotonic() + _EXIT_S
    while time.monotonic() < deadline and find(pid) is not None:
        time.sleep(_POLL_S)


def _spec_path(state: StateDir, file: Path | None) -> Path:
    if file is not None:
        return file.resolve()
    if not state.deployment_path.exists():
        raise click.UsageError(
            "no deployment file was applied before: name one, such as deployments/smollm2-cpu.yaml"
        )
    return state.deployment_path


def _run(
    state: StateDir, document: deployment_file.DeploymentDocument, no_ray: bool, timeout_s: float | None, *,
    watched: Path | None,
) -> int:  # fmt: skip
    _lock = lock(state)
    check_custom_policies(document.deployment)
    adopt(state, None)
    from tidegate.supervisor.supervisor import Supervisor  # noqa: PLC0415 - `up` and `down` answer without it

    progress = printed_progress(state, document)

    async def supervise() -> int:
        supervisor = Supervisor(state, document, ray=not no_ray, timeout_s=timeout_s, progress=progress)
        return await watching(
            supervisor.run(), watched, document.raw, supervisor.apply, progress, no_ray=no_ray
        )

    return asyncio.run(supervise())


async def watching(
    running: Coroutine[Any, Any, int], file: Path | None, applied: object,
    apply: Callable[[dict[str, Any]], Awaitable[None]], progress: ProgressLog, *, no_ray: bool,
) -> int:  # fmt: skip
    """The result of ``running``; meanwhile ``file``, if there is one, is applied when it changes."""
    if file is None:
        return await running

    def read() -> dict[str, Any]:
        return deployment_file.load(file, ray=not no_ray).raw

    def note(text: str) -> None:
        progress.emit(ProgressEvent(kind="note", message=text))

    watch = asyncio.create_task(watch_file(read, applied, apply, note))
    try:
        return await running
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


def lock(state: StateDir) -> int:
    """Hold the supervisor's lock until this process ends; raises :class:`PreconditionFailed`."""
    held = state.try_lock()
    if held is None:
        raise PreconditionFailed(f"a supervisor already runs on {state.root}: see `tidegate status`")
    return held


def adopt(state: StateDir, secret_file: Path | None) -> None:
    """Use the secret in the file, or in that of ``TIDEGATE_SECRET_FILE``, if either is given."""
    if given := secret_file or os.environ.get(_SECRET_FILE):
        state.adopt_secret(Path(given))


def printed_progress(
    state: StateDir, document: deployment_file.DeploymentDocument | None = None
) -> ProgressLog:
    """Events to the terminal and the supervisor's log; when it is ready, a first request to ``document``."""
    printer = EventPrinter()
    log = RotatingLog(state.logs / "supervisor.log")

    def echo(event: ProgressEvent) -> None:
        text = " ".join(filter(None, (event.kind, event.step, event.message)))
        with contextlib.suppress(OSError):
            log.write(line(_LEVELS.get(event.kind, "info"), text, {}))
        printer(event)
        if event.kind == "ready" and document is not None:
            click.echo(welcome(document.deployment))

    return ProgressLog(echo)


def _start_detached(
    state: StateDir,
    path: Path,
    document: deployment_file.DeploymentDocument,
    no_ray: bool,
    timeout_s: float | None,
) -> int:
    """Start ``tidegate run`` in a new session and follow its events; Ctrl-C stops it."""
    state.ensure()
    options = ["--no-ray"] if no_ray else []
    options += ["--timeout-s", str(timeout_s)] if timeout_s else []
    # For errors before the supervisor has a log.
    errors = state.logs / "supervisor.err"
    with errors.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate", "--state-dir", str(state.root), "run", str(path), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    client = SupervisorClient(state)
    try:
        code = _watch(_events(client, process), document)
    except KeyboardInterrupt:
        warn("interrupted: stopping what was started")
        process.terminate()
        process.wait()
        return ExitCode.INTERRUPTED
    except Unreachable:
        # The supervisor exited before its socket answered.
        code = process.wait()
        warn(errors.read_text(errors="replace").rstrip())
        return code or ExitCode.FAILED
    if code:
        process.wait()
    return code


def _events(client: SupervisorClient, process: subprocess.Popen[bytes]) -> Iterator[ProgressEvent]:
    while True:
        connected = False
        try:
            for event in client.follow():
                connected = True
                yield event
            return
        except Unreachable:
            if connected or process.poll() is not None:
                raise
        time.sleep(_POLL_S)


def _watch(events: Iterator[ProgressEvent], document: deployment_file.DeploymentDocument) -> int:
    printer = EventPrinter()
    for event in events:
        printer(event)
        if event.kind == "ready":
            click.echo(welcome(document.deployment))
            return ExitCode.OK
        if event.kind == "failed":
            return event.exit_code
    raise Unreachable("the supervisor ended before it was ready")
