"""Files as a tar stream: unpacked unchanged from chunks of any size."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.errors import AdapterRefused
from store.tar_stream import pack, unpack

CONTENT = {"a": b"", "b": b"x" * 511, "c": b"y" * 512, "d": bytes(range(256)) * 20}


def filled(folder: Path) -> Path:
    folder.mkdir()
    for name, data in CONTENT.items():
        (folder / name).write_bytes(data)
    return folder


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        for size in sizes:
            if block := data[at : at + size]:
                yield block
            at += size


@settings(max_examples=15)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_chunks_of_any_size_are_unpacked(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    root = tmp_path_factory.mktemp("tape")
    stream = b"".join(pack(filled(root / "from"), CONTENT))
    (root / "to").mkdir()
    unpack(cut(stream, sizes), root / "to", CONTENT, max_bytes=10_000)
    assert {path.name: path.read_bytes() for path in (root / "to").iterdir()} == CONTENT


@pytest.mark.parametrize("keep", [0, 100, 512, 1100, -1100])
def test_a_truncated_stream_is_refused(keep: int, tmp_path: Path) -> None:
    stream = b"".join(pack(filled(tmp_path / "from"), CONTENT))
    (tmp_path / "to").mkdir()
    with pytest.raises(AdapterRefused) as caught:
        unpack([stream[:keep]], tmp_path / "to", CONTENT, max_bytes=10_000)
    assert caught.value.code == "truncated"


def one(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(size + -size % 512)


@pytest.mark.parametrize(
    ("stream", "code"),
    [
        (one("../a"), "archive"),
        (one("/etc/passwd"), "archive"),
        (one("e"), "archive"),
        (one("a", tarfile.SYMTYPE), "archive"),
        (one("a", tarfile.DIRTYPE), "archive"),
        (one("a") + one("a"), "archive"),
        (one("a", size=11), "too_large"),
        (one("a", size=6) + one("b", size=6), "too_large"),
        (b"x" * 512, "archive"),
    ],
)
def test_unexpected_members_are_refused(stream: bytes, code: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused) as caught:
        unpack([stream, bytes(1024)], tmp_path, CONTENT, max_bytes=10)
    assert caught.value.code == code
