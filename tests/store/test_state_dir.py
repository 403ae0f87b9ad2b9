"""The state directory: private, with atomic writes, locked by one process."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from store.state_dir import StateDir, default_root, own_directory, write_atomic


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_secret_is_created_once_and_private(state: StateDir, tmp_path: Path) -> None:
    secret = state.secret()
    assert secret != StateDir(tmp_path / "other").secret()
    assert len(secret) >= 32
    assert state.secret() == StateDir(state.root).secret() == secret
    assert mode(state.secret_path) == 0o600
    assert mode(state.root) == mode(state.logs) == 0o700


@pytest.mark.parametrize(("text", "bits"), [("", 0o600), ("short", 0o600), ("x" * 40, 0o644)])
def test_a_short_or_readable_secret_is_refused(state: StateDir, text: str, bits: int) -> None:
    state.ensure()
    state.secret_path.write_text(text)
    state.secret_path.chmod(bits)
    with pytest.raises(PermissionError, match="mode 600"):
        state.secret()


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shared"
    assert own_directory(path) == own_directory(path) == path
    assert mode(path) == 0o700
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(PermissionError, match="link"):
        own_directory(link)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(PermissionError, match="a directory of this user"):
        own_directory(path)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_keeps_the_file_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with path.open("rb") as reader:
        write_atomic(path, b"newer")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"newer"


def test_saved_values_are_loaded(state: StateDir) -> None:
    assert state.load(state.targets_path, dict[str, int]) is None
    state.save(state.targets_path, {"toy": 2})
    assert state.load(state.targets_path, dict[str, int]) == {"toy": 2}
    assert mode(state.targets_path) == 0o600


def test_only_one_process_holds_the_lock(state: StateDir) -> None:
    held = state.try_lock()
    assert held is not None
    assert state.try_lock() is None
    os.close(held)
    again = state.try_lock()
    assert again is not None
    os.close(again)


def test_the_socket_of_a_long_path_has_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Path(tempfile.mkdtemp(prefix="r-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    shallow, deep = StateDir(Path("/s")), StateDir(tmp_path / ("d" * 120))
    assert shallow.socket_path == Path("/s/supervisor.sock")
    assert len(os.fsencode(deep.socket_path)) <= 107
    assert deep.socket_path.parent.parent == runtime
    assert deep.socket_path == StateDir(deep.root).socket_path
    assert deep.socket_path != StateDir(tmp_path / ("e" * 120)).socket_path
    shutil.rmtree(runtime)
    assert len(os.fsencode(deep.socket_path)) <= 107


def test_the_root_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("TIDEGATE_STATE_DIR", raising=False)
    assert default_root() == tmp_path / "tidegate"
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path / "own"))
    assert default_root() == tmp_path / "own"
