"""Models in a local directory: checked and used in place."""

from __future__ import annotations

import hashlib
from pathlib import Path

from policy.errors import ModelUnavailable
from store.progress_report import PreparedWeights


def prepare_directory(path: Path) -> PreparedWeights:
    """The model in ``path``, which holds ``config.json`` and ``*.safetensors``.

    The digest covers the name, size and modification time (nanoseconds) of every file and the content of each
    ``*.json``; weights are not read. Raises :class:`policy.errors.ModelUnavailable` with what is missing.
    """
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise ModelUnavailable(f"{path} {what}; expected a directory with config.json and *.safetensors")
    missing = [what for what in ("config.json", "*.safetensors") if not any(path.glob(what))]
    if missing:
        raise ModelUnavailable(f"{path} lacks {' and '.join(missing)}")
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
