"""Fuzz one target with atheris, guided by the code that its inputs reach, from the target's seeds on."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import tempfile
from pathlib import Path

import atheris

# Objects are counted after so many inputs; more of them than at the count before the last are a leak.
COUNTED_EVERY = 5_000
MOST_NEW_OBJECTS = 2_500


class Checked:
    """Calls ``check`` with each input, and fails if what it leaves behind grows."""

    def __init__(self, name: str) -> None:
        with atheris.instrument_imports(include=["gateway"]):
            self.target = importlib.import_module(f"tests.fuzz.{name}")
        self._inputs = self._before = 0

    def __call__(self, data: bytes) -> None:
        self.target.check(data)
        self._inputs += 1
        if self._inputs % COUNTED_EVERY == 0:
            gc.collect()
            objects = len(gc.get_objects())
            if self._before and objects > self._before + MOST_NEW_OBJECTS:
                raise RuntimeError(f"{objects - self._before} more objects after {COUNTED_EVERY} inputs")
            self._before = objects


def main() -> None:
    """Exit code 0 if nothing was found; an input that was is written to the current directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=["body_reader", "http_server"])
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--corpus", type=Path, help="keep what reaches new code in this directory")
    given = parser.parse_args()
    checked = Checked(given.target)
    with tempfile.TemporaryDirectory() as folder:
        corpus = given.corpus or Path(folder) / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(checked.target.SEEDS):
            (corpus / f"seed-{number}").write_bytes(seed)
        words = Path(folder) / "words"
        written = ("".join(f"\\x{byte:02x}" for byte in word) for word in checked.target.WORDS)
        words.write_text("".join(f'"{word}"\n' for word in written))
        limits = [f"-max_total_time={given.seconds}", "-max_len=8192", "-timeout=10", "-rss_limit_mb=2048"]
        atheris.Setup([sys.argv[0], *limits, f"-dict={words}", str(corpus)], checked)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
