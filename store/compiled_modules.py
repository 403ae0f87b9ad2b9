"""The request path as machine code: whether there is any, and of which sources.

The build backend compiles it when Tidegate is installed (``setup.py``), into :data:`FOLDER`, with a digest of
its sources. Gateway workers use it if they are the same, and run the sources otherwise; so do engines, for
what each token takes. Else the sources run: the simulator extends classes of the request path, and machine
code cannot be extended.

``python -m store.compiled_modules`` says which it is. Exit code 0: machine code of these sources; 1: none,
and a new installation makes none; 2: none, or of other sources, and a new installation may make it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import policy

# What the compiler reads: machine code holds the layout of structures in modules that are not compiled, too.
PACKAGES = ("policy", "gateway", "serve/engine", "store")
ROOT = Path(policy.__file__).parents[1]
SUFFIX = EXTENSION_SUFFIXES[0]
IN_WHEEL = Path("store", "machine-code")
_OF_CHECKOUT = ROOT / "build" / "machine-code" / str(sys.implementation.cache_tag)
FOLDER = ROOT / IN_WHEEL if (ROOT / IN_WHEEL).is_dir() else _OF_CHECKOUT
RECORD = "built.json"


def digest() -> str:
    """A digest of the sources and of the interpreter's binary interface."""
    whole = hashlib.sha256(SUFFIX.encode())
    for path in sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        whole.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def record(folder: Path, built_of: str, problem: str) -> None:
    """Called by the build backend: ``folder`` is built of sources with this digest, or why it is not."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text(json.dumps({"digest": built_of, "problem": problem}))


def state() -> tuple[int, str]:
    """The exit code of this module, and why there is no machine code of these sources (empty if there is)."""
    try:
        built = json.loads((FOLDER / RECORD).read_bytes())
    except (OSError, ValueError):
        return 2, "none was built"
    if built["digest"] != digest():
        return 2, "the sources have changed since it was built"
    return (1, built["problem"]) if built["problem"] else (0, "")


def use(packages: Sequence[str] = ()) -> str:
    """Have later imports of modules in ``packages``, or of any, take machine code.

    Returns why the sources run, if they do.
    """
    _, problem = state()
    if not problem:
        sys.meta_path.insert(0, _Compiled(packages))
    return problem


class _Compiled(MetaPathFinder):
    """Finds the modules in :data:`FOLDER` that are in ``packages``, all of them without any.

    What they have in common, outside of packages, is found in either case.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        found = {
            ".".join(path.relative_to(FOLDER).parts)[: -len(SUFFIX)]: path
            for path in FOLDER.rglob(f"*{SUFFIX}")
        }
        wanted = tuple(f"{package}." for package in packages)
        self._files = {
            name: path
            for name, path in found.items()
            if "." not in name or not wanted or name.startswith(wanted)
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def main() -> int:
    """Say it in one line."""
    code, problem = state()
    print(f"Tidegate runs from its sources, slower: {problem}" if problem else "compiled")  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
