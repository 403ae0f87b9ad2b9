"""The state directory: private, written whole, locked by one process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from store.state import StateDir, default_root, listen, write_atomic


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_secret_is_made_once_and_private(state: StateDir) -> None:
    secret = state.secret()
    assert len(secret) >= 32
    assert state.secret() == StateDir(state.root).secret() == secret
    assert mode(state.secret_path) == 0o600
    assert mode(state.root) == mode(state.logs) == 0o700


def test_two_directories_have_two_secrets(state: StateDir, tmp_path: Path) -> None:
    assert state.secret() != StateDir(tmp_path / "other").secret()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_values_come_back_as_they_were_saved(state: StateDir) -> None:
    assert state.load(state.targets_path, dict[str, int]) is None
    state.save(state.targets_path, {"toy": 2})
    assert state.load(state.targets_path, dict[str, int]) == {"toy": 2}
    assert mode(state.targets_path) == 0o600


def test_one_holder_has_the_lock(state: StateDir) -> None:
    held = state.try_lock()
    assert held is not None
    assert state.try_lock() is None
    os.close(held)
    again = state.try_lock()
    assert again is not None
    os.close(again)


def test_a_deep_directory_gets_a_short_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    shallow, deep = StateDir(Path("/s")), StateDir(tmp_path / ("d" * 120))
    assert shallow.socket_path == Path("/s/supervisor.sock")
    assert len(os.fsencode(deep.socket_path)) <= 107
    assert deep.socket_path.parent == Path("/run/user/1")
    assert deep.socket_path == StateDir(deep.root).socket_path
    assert deep.socket_path != StateDir(tmp_path / ("e" * 120)).socket_path


def test_the_root_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("TIDEGATE_STATE_DIR", raising=False)
    assert default_root() == tmp_path / "tidegate"
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path / "own"))
    assert default_root() == tmp_path / "own"


def test_a_taken_port_is_an_error_and_frees_the_socket() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])
