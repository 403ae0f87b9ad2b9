"""Adapters by digest: complete or absent for all processes, and not deleted shortly before use."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from policy.errors import AdapterRefused, TargetError
from store.adapters import CONFIG, FILES, WEIGHTS
from store.adapters.blobs import KEPT_S, AdapterBlobStore

ABSENT = "0" * 64


class Clock:
    """A clock that the test sets."""

    def __init__(self, root: Path) -> None:
        self.ahead = 0.0
        self._probe = root / "probe"

    def __call__(self) -> float:
        self._probe.touch()
        return self._probe.stat().st_mtime + self.ahead


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path)


@pytest.fixture
def blobs(tmp_path: Path, clock: Clock) -> AdapterBlobStore:
    return AdapterBlobStore(tmp_path / "adapters", clock)


def stored(blobs: AdapterBlobStore, weights: bytes = b"w") -> str:
    with blobs.work() as work:
        part = work / "a"
        part.mkdir()
        (part / CONFIG).write_bytes(b"{}")
        (part / WEIGHTS).write_bytes(weights)
        digest = blobs.seal(part, "/here")
        blobs.publish(part, digest)
    return digest


def test_a_published_adapter_is_found_by_its_digest(blobs: AdapterBlobStore, tmp_path: Path) -> None:
    digest = stored(blobs)
    path = blobs.path(digest)
    assert path == tmp_path / "adapters" / digest
    assert blobs.digests() == {digest}
    assert AdapterBlobStore(tmp_path / "adapters").path(digest) == path, "for another process, too"
    assert {each.name for each in path.iterdir()} == {*FILES, "manifest.json"}


@pytest.mark.parametrize("name", [ABSENT, "", "..", "../x", "a" * 63, "A" * 64, "a" * 64 + "\n"])
def test_an_unknown_or_invalid_digest_has_no_path(name: str, blobs: AdapterBlobStore) -> None:
    assert blobs.path(name) is None
    with pytest.raises(KeyError):
        blobs.tar(name)
    assert blobs.age_s(ABSENT) == float("inf")


@pytest.mark.parametrize("change", ["longer", "other", "gone", "more"])
def test_an_incomplete_adapter_is_ignored_and_replaced(
    change: str, blobs: AdapterBlobStore, tmp_path: Path
) -> None:
    digest = stored(blobs)
    path = tmp_path / "adapters" / digest
    weights = path / WEIGHTS
    weights.chmod(0o644)
    if change == "gone":
        weights.unlink()
    else:
        (path / "more" if change == "more" else weights).write_bytes({"longer": b"ww"}.get(change, b"v"))
    other = AdapterBlobStore(tmp_path / "adapters")
    assert other.missing([digest, ABSENT]) == {ABSENT}, "it was not read yet"
    assert other.path(digest) is None
    assert other.missing([digest, ABSENT]) == {digest, ABSENT}
    assert stored(other) == digest
    assert other.path(digest) == path
    assert other.missing([digest]) == set()
    assert weights.read_bytes() == b"w"


def test_a_directory_under_another_digest_is_not_found(blobs: AdapterBlobStore, tmp_path: Path) -> None:
    digest = stored(blobs)
    (tmp_path / "adapters" / digest).rename(tmp_path / "adapters" / ABSENT)
    assert blobs.path(ABSENT) is None
    assert blobs.path(digest) is None


def test_only_content_that_matches_its_digest_is_published(blobs: AdapterBlobStore) -> None:
    with blobs.work() as work:
        part = work / "a"
        part.mkdir()
        with pytest.raises(ValueError, match="is not sealed as"):
            blobs.publish(part, ABSENT)
        blobs.seal(part, "")
        with pytest.raises(ValueError, match="is not sealed as"):
            blobs.publish(part, ABSENT)


def test_publishing_again_only_resets_the_age(blobs: AdapterBlobStore, clock: Clock, tmp_path: Path) -> None:
    digest = stored(blobs)
    path = tmp_path / "adapters" / digest
    before = (path / WEIGHTS).stat().st_ino
    os.utime(path, (1, 1))
    assert blobs.age_s(digest) > 1e9
    assert stored(blobs) == digest
    assert blobs.age_s(digest) < 60
    assert (path / WEIGHTS).stat().st_ino == before


def test_several_threads_can_publish_the_same_content(blobs: AdapterBlobStore) -> None:
    threads = [threading.Thread(target=stored, args=(blobs,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (digest,) = blobs.digests()
    assert blobs.path(digest) is not None


def test_a_recently_published_adapter_is_not_removed(blobs: AdapterBlobStore, clock: Clock) -> None:
    digest = stored(blobs)
    assert not blobs.remove(digest, older_s=600)
    assert blobs.path(digest) is not None
    clock.ahead = 601.0
    assert blobs.remove(digest, older_s=600)
    assert (blobs.path(digest), blobs.digests()) == (None, set())
    assert blobs.remove(digest), "gone is gone"
    assert not blobs.remove("../x")


@pytest.mark.parametrize(
    ("limit", "digest", "code"),
    [(10, None, "too_large"), (1000, ABSENT, "changed"), (1000, None, "truncated")],
)
def test_an_invalid_stream_is_refused_and_leaves_no_files(
    limit: int, digest: str | None, code: str, blobs: AdapterBlobStore, tmp_path: Path
) -> None:
    had = stored(blobs, weights=b"w" * 100)
    node = AdapterBlobStore(tmp_path / "node")
    stream = b"".join(blobs.tar(had))
    with pytest.raises(AdapterRefused) as caught:
        node.take_tar([stream[:700] if code == "truncated" else stream], digest or had, limit)
    assert caught.value.code == code
    assert node.digests() == set()
    assert not list((tmp_path / "node").glob(".work-*"))


@pytest.mark.slow
def test_only_directories_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from store.adapters.blobs import AdapterBlobStore\n"
        "with AdapterBlobStore(Path(sys.argv[1])).work() as work:\n"
        "    (work / 'half').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(root)], check=False)
    assert ran.returncode == -9
    assert len(list(root.glob(".work-*/half"))) == 1
    blobs = AdapterBlobStore(root)
    assert not list(root.glob(".work-*"))
    with blobs.work() as work:
        AdapterBlobStore(root)
        assert work.is_dir()
    assert not work.exists()


def test_interrupted_downloads_are_kept_for_a_week(
    blobs: AdapterBlobStore, clock: Clock, tmp_path: Path
) -> None:
    def unreachable() -> None:
        with blobs.parts("s3://b/k") as parts:
            (parts / "half").write_text("x")
            raise AdapterRefused("source_unreachable", "")

    with pytest.raises(AdapterRefused):
        unreachable()
    AdapterBlobStore(tmp_path / "adapters", clock)
    with blobs.parts("s3://b/other") as parts:
        assert not list(parts.iterdir())
    with blobs.parts("s3://b/k") as parts:
        assert (parts / "half").read_text() == "x"
    assert not list((tmp_path / "adapters" / ".parts").iterdir()), "it all went well"
    with pytest.raises(AdapterRefused):
        unreachable()
    clock.ahead = KEPT_S + 60
    with blobs.parts("s3://b/k"):
        AdapterBlobStore(tmp_path / "adapters", clock)
        assert parts.exists(), "somebody is at it"
    with pytest.raises(AdapterRefused):
        unreachable()
    AdapterBlobStore(tmp_path / "adapters", clock)
    assert not list((tmp_path / "adapters" / ".parts").iterdir())


@pytest.mark.parametrize(("content", "code"), [("x", "too_large"), ("", "source_unreachable")])
def test_refused_and_empty_downloads_are_not_kept(blobs: AdapterBlobStore, content: str, code: str) -> None:
    with pytest.raises(AdapterRefused), blobs.parts("s") as parts:
        (parts / "archive.part").write_text(content)
        raise AdapterRefused(code, "")
    assert not parts.exists()


def test_the_least_recently_used_adapters_are_trimmed(
    blobs: AdapterBlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c, d = digests = [stored(blobs, weights=letter * 1000) for letter in (b"a", b"b", b"c", b"d")]
    for age, digest in enumerate(digests):
        os.utime(tmp_path / "adapters" / digest, (age, age))
    size = sum(file.stat().st_size for file in (tmp_path / "adapters" / a).iterdir())
    other = AdapterBlobStore(tmp_path / "adapters")
    held = other.use(b)
    assert held is not None
    other.trim(4 * size)
    assert blobs.digests() == set(digests)
    other.trim(3 * size)
    assert blobs.digests() == {b, c, d}
    os.utime(tmp_path / "adapters" / b, (0, 0))
    other.trim(2 * size)
    assert blobs.digests() == {b, d}, "b is in use"
    os.close(held)
    # A disk without free space: they may have half of what they have.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    blobs.trim(100 * size)
    assert blobs.digests() == {d}
    assert not list((tmp_path / "adapters").glob(".work-*"))
    assert (other.path(b), other.use(b), other.use("..")) == (None, None, None)


def test_use_resets_the_age(blobs: AdapterBlobStore, clock: Clock, tmp_path: Path) -> None:
    digest = stored(blobs)
    os.utime(tmp_path / "adapters" / digest, (1, 1))
    held = blobs.use(digest)
    assert held is not None
    os.close(held)
    assert blobs.age_s(digest) < 60


def failure(kind: str) -> Exception:
    """An error of a download: of this disk, wrapped as fetches wrap it, or of something else."""
    if kind == "cancelled":
        return TargetError("sql was removed")
    error = {
        "full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        "quota": OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        "backend": RuntimeError("IO Error: No space left on device (os error 28)"),
    }.get(kind, OSError(errno.EIO, os.strerror(errno.EIO)))
    if kind in ("quota", "backend", "reset"):
        refused = AdapterRefused("source_unreachable", "")
        refused.__cause__ = error
        return refused
    return error


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("full", False),
        ("quota", False),
        ("backend", False),
        ("cancelled", False),
        ("reset", True),
        ("io", True),
    ],
)
def test_downloads_that_fill_the_disk_or_are_cancelled_are_not_kept(
    blobs: AdapterBlobStore, kind: str, kept: bool
) -> None:
    error = failure(kind)
    with pytest.raises(type(error)), blobs.parts("s") as parts:
        (parts / "archive.part").write_text("x")
        raise error
    assert parts.exists() is kept


def test_only_one_process_fetches_a_source_at_a_time(blobs: AdapterBlobStore) -> None:
    order: list[str] = []
    entered, waiting = threading.Event(), threading.Event()

    def second() -> None:
        entered.wait()
        waiting.set()
        with blobs.parts("s"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with blobs.parts("s"):
        entered.set()
        waiting.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_holders_of_one_source_take_turns(tmp_path: Path) -> None:
    inside, errors = threading.Lock(), []

    def hold_often() -> None:
        for _ in range(150):
            try:
                with AdapterBlobStore(tmp_path).parts("s"):
                    assert inside.acquire(blocking=False)
                    inside.release()
            except Exception as error:  # noqa: BLE001
                errors.append(error)

    threads = [threading.Thread(target=hold_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
