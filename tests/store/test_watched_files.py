from __future__ import annotations

import os
from pathlib import Path

from store.watched_files import WatchedFiles


def test_files_are_read_again_when_any_was_changed_replaced_or_removed(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    files = WatchedFiles(first, second)
    assert files.changed() and files.changed(), "as long as they were not read"
    files.were_read()
    assert not files.changed()
    second.write_text("2")
    assert files.changed()
    second.write_text("22")
    files.were_read()
    assert files.changed(), "it was changed after the look"
    files.were_read()
    part = tmp_path / "part"
    part.write_text("33")
    os.utime(part, ns=(second.stat().st_atime_ns, second.stat().st_mtime_ns))
    part.replace(second)
    assert files.changed(), "replaced by a file of the same size and time"
    files.were_read()
    first.unlink()
    assert files.changed()
