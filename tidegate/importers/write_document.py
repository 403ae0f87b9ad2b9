"""Write a deployment file that was made of something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from policy.deployment_file.parse import parse
from policy.errors import PreconditionFailed
from store.state_dir import write_atomic


def write_document(path: Path, document: dict[str, Any], head: str, *, force: bool) -> None:
    """Check ``document`` and write it as YAML under the comment ``head``.

    A file with another content is replaced only with ``force``. Raises
    :class:`policy.errors.ConfigError` and :class:`policy.errors.PreconditionFailed`.
    """
    parse(document)
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    text = comment + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    if path.exists() and not force and path.read_text(encoding="utf-8") != text:
        raise PreconditionFailed(
            f"{path}: expected no file, or one with the same content:"
            " --force replaces it, --output names another"
        )
    write_atomic(path, text.encode())
