"""Log lines: an instant, a level and an event; of an error its places, and no text that quotes a request."""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from store.json_log_format import MAX_PLACES, FileHandler, error_fields, line, log_to
from store.log_file import RotatingLog

SECRET = "canary-word"


def decode() -> None:
    msgspec.json.decode(f'{{"a": "{SECRET}"}}', type=dict[str, int])


def look_up() -> None:
    try:
        {}[SECRET]
    except KeyError as error:
        raise ValueError(f"no {SECRET}") from error


def recurse(depth: int = 0) -> None:
    if depth > 100:
        raise RuntimeError(SECRET)
    recurse(depth + 1)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space", f"/tmp/{SECRET}")


def test_a_line_has_an_instant_a_level_and_an_event() -> None:
    written = line("info", "request", {"status": 200})
    fields = json.loads(written)
    assert written.endswith(b"\n") and datetime.fromisoformat(fields.pop("at")).utcoffset() is not None
    assert fields == {"level": "info", "event": "request", "status": 200}


@pytest.mark.parametrize(
    ("fail", "name", "last"),
    [
        (decode, "ValidationError", "decode"),
        (look_up, "ValueError", "look_up"),
        (recurse, "RuntimeError", "recurse"),
        (disk_full, "OSError ENOSPC", "disk_full"),
        (lambda: SECRET.encode().decode("utf-32"), "UnicodeDecodeError", "<lambda>"),
        (lambda: int(SECRET), "ValueError", "<lambda>"),
    ],
)
def test_an_error_is_named_with_its_places_and_without_its_text(
    fail: Callable[[], object], name: str, last: str
) -> None:
    with pytest.raises(Exception) as caught:
        fail()
    fields = error_fields(caught.value)
    places = fields["traceback"]
    assert isinstance(places, list)
    own, _, causes = "\n".join(places).partition("\ncaused by ")
    assert fields["error"] == name
    assert re.search(rf"^{__name__}:\d+ {last}$", own, re.MULTILINE)
    assert causes.startswith("KeyError\n") is (fail is look_up)
    assert len(places) <= MAX_PLACES
    assert SECRET not in line("error", "call_failed", fields).decode()


def test_errors_of_pythons_logging_keep_their_text_in_processes_without_prompts(tmp_path: Path) -> None:
    log = logging.getLogger("tidegate.test")
    log_to(handler := FileHandler(RotatingLog(tmp_path / "controller.log")), log.name)
    try:
        log.warning("adapter %s: removed", "sql")
        try:
            look_up()
        except ValueError:
            log.exception("not\nadded")
    finally:
        log.removeHandler(handler)
        handler.close()
    warning, error = map(json.loads, (tmp_path / "controller.log").read_text().splitlines())
    assert (warning["level"], warning["event"]) == ("warning", "adapter sql: removed")
    assert (error["level"], error["event"]) == ("error", "not\nadded")
    assert error["error"] == f"ValueError: no {SECRET}"
    assert "caused by KeyError" in error["traceback"]
