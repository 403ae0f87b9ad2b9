"""Models in a local directory: checked and used in place."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from policy.errors import ModelUnavailable
from store.progress_report import PreparedWeights

INDEX = "*.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d+)\.safetensors")


class _Index(msgspec.Struct):
    """The part of an index that says which files hold the weights: a file name by tensor."""

    weight_map: dict[str, str] = {}


def prepare_directory(path: Path) -> PreparedWeights:
    """The model in ``path``, which holds ``config.json`` and ``*.safetensors``, all files of each index.

    The digest covers the name, size and modification time (nanoseconds) of every file and the content of each
    ``*.json``; weights are not read. Raises :class:`policy.errors.ModelUnavailable` with what is missing.
    """
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise ModelUnavailable(f"{path} {what}; expected a directory with config.json and *.safetensors")
    missing = [what for what in ("config.json", "*.safetensors") if not any(path.glob(what))]
    if missing:
        raise ModelUnavailable(f"{path} lacks {' and '.join(missing)}")
    if (lacking := next(_lacking_shards(path), "")) != "":
        raise ModelUnavailable(f"{path} lacks {lacking}: it was not copied or downloaded completely")
    whole = hashlib.sha256()
    try:
        for file in sorted(each for each in path.iterdir() if each.is_file()):
            state = file.stat()
            whole.update(f"{file.name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
            if file.suffix == ".json":
                whole.update(file.read_bytes())
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error
    return PreparedWeights(path=path, digest=whole.hexdigest())


def _lacking_shards(path: Path) -> Iterator[str]:
    """The weights that are missing. Engines load quantized models without some of their weights."""
    here = {file.name for file in path.glob("*.safetensors")}
    indexed: set[str] = set()
    for index in sorted(path.glob(INDEX)):
        try:
            named = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except (OSError, ValueError) as error:
            raise ModelUnavailable(f"{index} cannot be read: {error}") from error
        # The index of another format may be there without any of its files.
        if named & here:
            indexed |= named
    yield from sorted(name for name in indexed if not (path / name).is_file())
    # An index may be missing too. The first shard has the number 0 or 1.
    counts = Counter(
        match.group("stem", "count") for name in here - indexed if (match := _SHARD.fullmatch(name))
    )
    for (stem, count), found in sorted(counts.items()):
        if found < int(count):
            yield f"{int(count) - found} of the files {stem}-*-of-{count}.safetensors"
