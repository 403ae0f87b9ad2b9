"""The state directory: one place per deployment for the secret, the lock, process ids and logs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from policy.errors import PreconditionFailed

T = TypeVar("T")

MIN_SECRET = 16


def default_root() -> Path:
    """``TIDEGATE_STATE_DIR``, else ``$XDG_STATE_HOME/tidegate``, else ``~/.local/state/tidegate``."""
    if chosen := os.environ.get("TIDEGATE_STATE_DIR"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tidegate"


def cache_dir(name: str) -> Path:
    """``$XDG_CACHE_HOME/tidegate/NAME``, else under ``~/.cache``: what can be made or fetched again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate" / name


def own_directory(path: Path) -> Path:
    """Make the directory ``path`` where others may write; ``PermissionError`` if another user made it."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path}: expected a directory of this user; remove what is there")
    return path


def private_directory() -> Path:
    """A directory of this user on this node that lasts until it restarts, with a short path."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not Path(base).is_dir() or not base:
        base = tempfile.gettempdir()
    return own_directory(Path(base) / f"tidegate-{os.getuid()}")


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace the file ``path`` atomically."""
    part = write_beside(path, data, mode)
    try:
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_beside(path: Path, data: bytes, mode: int = 0o644) -> Path:
    """Write a file that may replace ``path``, and return its name."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def read_secret(path: Path, least: int) -> bytes:
    """The secret in ``path``, made on first use with mode 600, by one of several processes.

    Raises ``PermissionError`` for fewer than ``least`` characters, or if other users can read it.
    """
    if not path.exists():
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        write_atomic(part, secrets.token_urlsafe(48).encode(), mode=0o600)
        with suppress(FileExistsError):
            path.hardlink_to(part)
        part.unlink()
    secret = path.read_bytes().strip()
    if len(secret) < least or path.stat().st_mode & 0o077:
        raise PermissionError(
            f"{path}: expected at least {least} characters that only its owner may read (mode 600);"
            " remove it to have a new one made"
        )
    return secret


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file ``path``, made with mode 600, among all threads and processes of this machine.

    ``waiting`` is called if another one holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Under:
    """A path under the root of a state directory."""

    name: str

    def __get__(self, state: StateDir, owner: type[StateDir]) -> Path:
        return state.root / self.name


@dataclass(frozen=True)
class StateDir:
    """Paths under one root, created on demand with mode 700."""

    root: Path

    logs = _Under("logs")
    lock_path = _Under("supervisor.lock")
    secret_path = _Under("secret")
    admin_token_path = _Under("admin-token")
    # The deployment file that was applied last, as JSON.
    deployment_path = _Under("deployment.json")
    # The controller's targets and revisions.
    targets_path = _Under("targets.json")
    # The replica hosts of a controller without Ray.
    hosts_path = _Under("hosts.json")
    # The shared GPU groups, and how many engines of each shape are awake. Earlier versions wrote the second.
    gpu_groups_path = _Under("gpu-groups.json")
    old_gpu_groups_path = _Under("beds.json")
    # The runs of the controller that ended soon, and their last error.
    controller_run_path = _Under("controller-run.json")
    # The log of the controller's decisions, one JSON object per line.
    decisions_path = _Under("decisions.jsonl")
    # The state of the scaling policies.
    memory_path = _Under("memory.json")
    # The performance models fitted to live replicas, one file per model and shape.
    calibrations = _Under("calibrations")
    # The last fleet and the last adapter catalog that a gateway received.
    fleet_path = _Under("fleet.json")
    catalog_path = _Under("catalog.json")
    # Declared adapters that users removed since the deployment file was applied.
    removed_path = _Under("adapters-removed.json")
    # The base models that adapters were checked with, and the adapters that do not fit them.
    checked_bases_path = _Under("adapter-bases.json")
    # Process ids that `down` may end.
    processes_path = _Under("processes.json")
    # The gateway workers' shared counters.
    metrics_dir = _Under("metrics")
    # The files of LoRA adapters, by digest.
    adapters = _Under("adapters")
    # The embedded database, unless the deployment file names another.
    database_path = _Under("tidegate.db")
    # Tenants and keys of the database, as the accounting process gives them to the workers; mode 600.
    access_path = _Under("access.ndjson")
    # Audit entries that are not in the database yet.
    audit_spool_path = _Under("audit-pending.ndjson")
    host_id_path = _Under("host-id")
    # The usage of requests that the ledger does not have yet.
    usage_path = _Under("usage")
    # Shared memory of this machine's gateway workers; mode 600. The second is the accounting process's, too.
    rows_path = _Under("gateway.rows")
    limits_path = _Under("limits.rows")

    def ensure(self) -> StateDir:
        """Create the directory and its logs folder."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.logs.mkdir(mode=0o700, exist_ok=True)
        return self

    @property
    def socket_path(self) -> Path:
        """The supervisor's Unix socket; the path of a socket has at most 107 bytes."""
        return self._short_path("supervisor.sock", "sock", 100)

    @property
    def accounting_socket_path(self) -> Path:
        """The accounting process's Unix socket."""
        return self._short_path("accounting.sock", "accounting", 100)

    @property
    def captures(self) -> Path:
        """The directory of the sockets of captures, made by the first one."""
        return self._short_path("captures", "captures", 80)

    def _short_path(self, name: str, suffix: str, max_bytes: int) -> Path:
        """``name`` under the root, or a path under the runtime directory if that one is too long."""
        direct = self.root / name
        if len(os.fsencode(direct)) <= max_bytes:
            return direct
        return private_directory() / f"{hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]}.{suffix}"

    def database_url(self, store: str) -> str:
        """The database of a deployment: ``store`` of its file, or the embedded one."""
        return store or f"sqlite:///{self.database_path}"

    def secret(self) -> str:
        """The secret that guards every internal port, made on first use with mode 600."""
        return read_secret(self.ensure().secret_path, MIN_SECRET).decode()

    def adopt_secret(self, path: Path) -> None:
        """Use the secret in the file ``path``, which another host made.

        Raises :class:`policy.errors.PreconditionFailed` if there is none.
        """
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise PreconditionFailed(f"{path}: {error.strerror}") from None
        if len(secret) < MIN_SECRET:
            raise PreconditionFailed(
                f"{path}: expected the secret of a deployment, {MIN_SECRET} characters or more"
            )
        write_atomic(self.ensure().secret_path, secret, mode=0o600)

    def admin_token(self) -> str:
        """The token for ``/admin`` on the admin port, made on first use with mode 600.

        It is read for each request: removing the file replaces the token at once.
        """
        return read_secret(self.ensure().admin_token_path, MIN_SECRET).decode()

    def host_id(self) -> str:
        """The id of this machine among those that share a database, made on first use."""
        return read_secret(self.ensure().host_id_path, MIN_SECRET).decode()

    def load(self, path: Path, kind: type[T]) -> T | None:
        """Decode a JSON file of this directory; ``None`` when it does not exist."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None

    def save(self, path: Path, value: Any) -> None:
        """Write ``value`` as JSON, atomically."""
        self.ensure()
        write_atomic(path, msgspec.json.encode(value), mode=0o600)

    def set_aside(self, path: Path) -> str:
        """Keep a file that cannot be decoded under another name, which is returned."""
        aside = path.with_suffix(".unreadable")
        path.replace(aside)
        return str(aside)

    def try_lock(self) -> int | None:
        """Take the supervisor's lock until the returned descriptor is closed; ``None`` if it is held."""
        self.ensure()
        descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor


def listen_at(path: Path) -> socket.socket:
    """A listening Unix socket that only this user can open, in place of any at ``path``."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(os.fspath(path))
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(mask)
    sock.setblocking(False)
    return sock


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening TCP socket; raises ``OSError`` when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(4096)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
