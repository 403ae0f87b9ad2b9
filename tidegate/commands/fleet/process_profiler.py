"""``profile``: a flame graph of one running process, or a trace of an engine's operators."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import click
import httpx
import psutil

from policy.errors import PreconditionFailed, TargetError, TidegateError, Unreachable
from policy.types import Replica
from policy.wire.headers import SECRET_HEADER
from policy.wire.load_stream import PROFILE
from store.os_process import find
from store.state_dir import StateDir
from tidegate.commands.deployment_context import controller_client
from tidegate.commands.options import FiniteFloat, OutputFile, number_option
from tidegate.commands.terminal import warn
from tidegate.supervisor.control_socket import SupervisorClient

# What the command lines of these processes contain; Ray names the processes of its actors.
_ENGINE = ("serve.engine.main",)
_CONTROLLER = ("serve.controller.process", "ControllerActor")
# Beside the duration: py-spy reads the symbols of all libraries first, and draws at the end.
_LONGER_S = 60.0
_DENIED = ("permission denied", "operation not permitted")
# vLLM writes for some seconds for each recorded one.
_WRITING_S = 600.0
# What py-spy says if no sample found the process at work.
_IDLE = "No stack counts found"


@click.command(
    help="Sample a running process and write a flame graph, as one SVG file.\n\nPROCESS is `gateway` (NAME:"
    " a worker number, by default 0), `controller`, `replica` (NAME: its id; the process that watches the"
    " engine) or `engine` (NAME: the id of its replica), with its child processes. NAME may be left out if"
    " there is one replica.\n\nWith --torch, vLLM's own profiler records the operators and GPU kernels of an"
    " engine, on any node: a trace for https://ui.perfetto.dev."
)
@click.argument("process", type=click.Choice(["gateway", "controller", "replica", "engine"]))
@click.argument("name", required=False)
@number_option("--seconds", FiniteFloat(1, 3600), 10.0, "Duration.")
@number_option("--rate", click.IntRange(1, 1000), 100, "Samples per second.")
@click.option("--native", is_flag=True, help="Show functions of compiled modules too, as the request path.")
@click.option("--torch", is_flag=True, help="Of an engine: a trace by vLLM's profiler.")
@click.option("--out", type=OutputFile(), help="The file, by default profile.svg, or trace.json.gz.")
@click.pass_obj
def profile(  # noqa: PLR0917 - click passes them by name
    state: StateDir,
    process: str,
    name: str | None,
    seconds: float,
    rate: int,
    native: bool,
    torch: bool,
    out: Path | None,
) -> None:
    if torch:
        if process != "engine":
            raise click.UsageError("--torch is for an engine")
        replica = _replica(controller_client(state).fleet().replicas, name)
        trace = out or Path("trace.json.gz")
        warn(f"Recording {replica.id} for {seconds:g} s. It stands still while the trace is written.")
        _trace(replica, state.secret(), seconds, trace)
        click.echo(str(trace))
        return
    out = out or Path("profile.svg")
    pid = _pid(state, process, name)
    flags = [*(["--native"] if native else []), *(["--subprocesses"] if process == "engine" else [])]
    warn(f"Sampling {process} (pid {pid}) for {seconds:g} s.")
    _record(pid, seconds, ["--rate", str(rate), *flags], out)
    click.echo(str(out))


def _record(pid: int, seconds: float, flags: list[str], out: Path) -> None:
    tool = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if tool is None:
        raise PreconditionFailed("py-spy is not installed: scripts/install")
    ran = subprocess.run(
        [
            tool,
            "record",
            "--pid",
            str(pid),
            "--duration",
            f"{max(1, round(seconds))}",
            "--output",
            str(out),
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=seconds + _LONGER_S,
        check=False,
    )
    if ran.returncode == 0 and out.exists():
        return
    out.unlink(missing_ok=True)  # py-spy creates it first
    said = (ran.stdout + ran.stderr).strip()
    if _IDLE in said:
        raise TidegateError(
            f"process {pid} computed nothing in {seconds:g} s: send requests meanwhile, or sample for longer"
        )
    if any(word in said.lower() for word in _DENIED):
        raise PreconditionFailed(
            f"this user may not read process {pid}: run the command as root (sudo), or allow it:"
            " `sudo sysctl kernel.yama.ptrace_scope=0`, in a container `--cap-add SYS_PTRACE`"
        )
    if find(pid) is None:
        raise TidegateError(f"process {pid} ended before it was sampled")
    raise TidegateError(f"py-spy failed with status {ran.returncode}: {said[:500]}")


def _trace(replica: Replica, secret: str, seconds: float, out: Path) -> None:
    """Write the trace of an engine; raises :class:`policy.errors.TidegateError` with its message."""
    url = f"{replica.url}{PROFILE}?seconds={seconds:g}"
    headers = {SECRET_HEADER: secret}
    try:
        with httpx.stream(
            "POST", url, headers=headers, timeout=seconds + _WRITING_S, trust_env=False
        ) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                raise TidegateError(f"{replica.id}: {answer.json()['error']['message']}")
            with out.open("wb") as file:
                for part in answer.iter_bytes():
                    file.write(part)
    except httpx.HTTPError as error:
        out.unlink(missing_ok=True)
        raise Unreachable(f"{replica.id} at {replica.url} did not answer: {error!r}") from error


def _pid(state: StateDir, process: str, name: str | None) -> int:
    """The process id; raises :class:`policy.errors.TargetError` with what there is, if there is none."""
    if process == "gateway":
        return _gateway_worker(state, name or "0")
    if process == "controller":
        if name is not None:
            raise click.UsageError("there is one controller: leave out NAME")
        return _here(controller_client(state).status().pid, "the controller", "", _CONTROLLER)
    replica = _replica(controller_client(state).fleet().replicas, name)
    engine = _here(replica.pid, f"the engine of {replica.id}", replica.node, _ENGINE)
    return engine if process == "engine" else psutil.Process(engine).ppid()


def _gateway_worker(state: StateDir, number: str) -> int:
    workers = {
        each.name.removeprefix("gateway-"): each.pid
        for each in SupervisorClient(state).status().processes
        if each.name.startswith("gateway-")
    }
    if number not in workers:
        raise TargetError(f"no gateway worker {number!r}; there are {', '.join(workers)}")
    if not workers[number]:
        raise Unreachable(f"gateway worker {number} is down; it is being restarted")
    return workers[number]


def _replica(replicas: tuple[Replica, ...], name: str | None) -> Replica:
    running = {replica.id: replica for replica in replicas if replica.pid}
    if not running:
        raise TargetError("no replica has an engine that runs")
    if name is None and len(running) == 1:
        return next(iter(running.values()))
    if name not in running:
        asked = "name one replica" if name is None else f"no replica {name!r}"
        raise TargetError(f"{asked}; there are {', '.join(sorted(running))}")
    return running[name]


def _here(pid: int, what: str, node: str, names: tuple[str, ...]) -> int:
    """``pid``, if that process is on this machine: its command line then contains one of ``names``."""
    found = find(pid)
    line = " ".join(found.cmdline()) if found is not None else ""
    if not any(name in line for name in names):
        where = f" (node {node})" if node else ""
        raise TargetError(
            f"{what}, pid {pid}, is not on this machine{where}; there run:"
            f" py-spy record --subprocesses --pid {pid} --duration 10 --output profile.svg"
        )
    return pid
