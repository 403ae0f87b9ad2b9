"""The state directory: one place per deployment for the secret, the lock, process ids and logs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MIN_SECRET = 16


def default_root() -> Path:
    """``TIDEGATE_STATE_DIR``, else ``$XDG_STATE_HOME/tidegate``, else ``~/.local/state/tidegate``."""
    if chosen := os.environ.get("TIDEGATE_STATE_DIR"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tidegate"


def own_directory(path: Path) -> Path:
    """Make ``path``, in a place where others may write, and make sure that it is this user's.

    Raises ``PermissionError`` when another user made it first: what lies in it would be theirs to choose.
    """
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
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class StateDir:
    """Paths under one root, created on demand with mode 700."""

    root: Path

    def ensure(self) -> StateDir:
        """Create the directory and its logs folder."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.logs.mkdir(mode=0o700, exist_ok=True)
        return self

    @property
    def lock_path(self) -> Path:
        return self.root / "supervisor.lock"

    @property
    def socket_path(self) -> Path:
        """The supervisor's unix socket.

        A unix socket's path is at most 107 bytes, so a deep state directory gets a short one under
        the runtime directory, named by the digest of the root.
        """
        direct = self.root / "supervisor.sock"
        if len(os.fsencode(direct)) <= 100:
            return direct
        return private_directory() / f"{self._short}.sock"

    @property
    def captures(self) -> Path:
        """The directory of the sockets of those who capture what the gateway serves.

        It is made by the first of them, and has a short path as the supervisor's socket has.
        """
        direct = self.root / "captures"
        if len(os.fsencode(direct)) <= 80:
            return direct
        return private_directory() / f"{self._short}.captures"

    @property
    def _short(self) -> str:
        return hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]

    @property
    def secret_path(self) -> Path:
        return self.root / "secret"

    @property
    def deployment_path(self) -> Path:
        """The deployment file that was applied last, as JSON."""
        return self.root / "deployment.json"

    @property
    def targets_path(self) -> Path:
        """The controller's targets and generations."""
        return self.root / "targets.json"

    @property
    def decisions_path(self) -> Path:
        """The log of the controller's decisions, one JSON object a line."""
        return self.root / "decisions.jsonl"

    @property
    def memory_path(self) -> Path:
        """The state of the scaling policies."""
        return self.root / "memory.json"

    @property
    def calibrations(self) -> Path:
        """The engine models that were fitted to live replicas, a file for each model and shape."""
        return self.root / "calibrations"

    @property
    def fleet_path(self) -> Path:
        """The last fleet that a gateway saw."""
        return self.root / "fleet.json"

    @property
    def catalog_path(self) -> Path:
        """The last catalog of adapters that a gateway saw."""
        return self.root / "catalog.json"

    @property
    def removed_path(self) -> Path:
        """Declared adapters that users removed since the deployment file was applied."""
        return self.root / "adapters-removed.json"

    @property
    def processes_path(self) -> Path:
        """Process ids that ``down`` may end."""
        return self.root / "processes.json"

    @property
    def metrics_dir(self) -> Path:
        """Where gateway workers keep their shared counters."""
        return self.root / "metrics"

    @property
    def adapters(self) -> Path:
        """The files of LoRA adapters, by digest."""
        return self.root / "adapters"

    @property
    def database_path(self) -> Path:
        """The embedded database, if the deployment file names no other."""
        return self.root / "tidegate.db"

    @property
    def rows_path(self) -> Path:
        """Shared memory of this machine's gateway workers; a file of mode 600."""
        return self.root / "gateway.rows"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def secret(self) -> str:
        """The secret that guards every internal port, made on first use with mode 600."""
        self.ensure()
        if not self.secret_path.exists():
            write_atomic(self.secret_path, secrets.token_urlsafe(32).encode(), mode=0o600)
        secret = self.secret_path.read_text().strip()
        if len(secret) < MIN_SECRET or self.secret_path.stat().st_mode & 0o077:
            raise PermissionError(
                f"{self.secret_path}: expected at least {MIN_SECRET} characters that only its owner may read"
                " (mode 600); remove it to have a new one made"
            )
        return secret

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

    def try_lock(self) -> int | None:
        """Take the supervisor's lock; ``None`` when another process holds it.

        The lock lives as long as the returned descriptor, so a dead supervisor holds nothing.
        """
        self.ensure()
        descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor


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
