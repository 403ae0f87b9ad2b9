"""Models on the Hugging Face hub: a snapshot in the hub's own cache, safetensors only."""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from policy.errors import ModelUnavailable
from store.model_weights.directory_source import prepare_directory
from store.progress_report import PreparedWeights, ProgressLine, Report

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?")
WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
# Folders often repeat the weights in other formats; code is never needed.
UNWANTED = ["*/*", "*.bin", "*.pt", "*.pth", "*.py"]
# How long the hub may be silent: for the connection, and between two blocks of an answer.
SILENT_S = 30.0
_CLIENT = threading.Lock()


def prepare_hub(source: str, *, token_file: str | None, report: Report) -> PreparedWeights:
    """The snapshot of ``ORG/NAME`` or ``ORG/NAME@REVISION``; cached files are not fetched again.

    The digest is the snapshot's commit. Raises :class:`policy.errors.ModelUnavailable`.
    """
    match = ID.fullmatch(source)
    if match is None:
        raise ModelUnavailable(f"{source!r} is not ORG/NAME or ORG/NAME@REVISION")
    token = read_token(token_file)
    limit_silence()
    report(ProgressLine(step="fetch", message=f"fetching {source} from the Hugging Face hub"))
    try:
        path = huggingface_hub.snapshot_download(
            match["repo"],
            revision=match["revision"],
            token=token,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            tqdm_class=reporter(source, report),
        )
    except Exception as error:  # the hub's HTTP client and its download backends have their own exceptions
        raise ModelUnavailable(explain(source, token, error)) from error
    snapshot = Path(str(path))
    return PreparedWeights(path=prepare_directory(snapshot).path, digest=snapshot.name)


def limit_silence() -> None:
    """Let the hub's client wait at most ``SILENT_S``; it asks for revisions and lists without a timeout."""
    with _CLIENT:  # a second call at the same time would close the client of a request
        _replace_client()


@functools.cache
def _replace_client() -> None:
    made = huggingface_hub.get_session()
    kind, hooks = type(made), made.event_hooks["request"]

    def client() -> Any:
        return kind(follow_redirects=True, timeout=None, event_hooks={"request": [*hooks, _limit]})

    huggingface_hub.set_client_factory(client)


def _limit(request: Any) -> None:
    """A hook, because a client's own timeout does not count for requests that say they have none."""
    given = request.extensions["timeout"]
    request.extensions["timeout"] = {
        name: SILENT_S if seconds is None else seconds for name, seconds in given.items()
    }


def read_token(token_file: str | None) -> str | None:
    """The token in the file, if one is named; raises :class:`policy.errors.ModelUnavailable`."""
    if token_file is None:
        return None
    try:
        token = Path(token_file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"token_file {token_file} cannot be read: {error}") from error
    if not token:
        raise ModelUnavailable(f"token_file {token_file} is empty")
    return token


def explain(source: str, token: str | None, error: Exception) -> str:
    """A message for an error of the hub's client: cause and remedy, without the token."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError) or status == 403:
        hint = "the token may not read it" if token else "it needs a token: set token_file"
        return f"the Hugging Face hub refuses {source}: {hint}"
    if isinstance(error, RevisionNotFoundError):
        return f"{source}: the Hugging Face hub has no such revision"
    # The hub answers 401 both for a private repository and for one that does not exist.
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        hint = "the token may not read it" if token else "it needs a token (set token_file)"
        return f"{source} does not exist on the Hugging Face hub, or {hint}"
    if isinstance(error, LocalEntryNotFoundError):
        return f"{source} is not in the local cache and the Hugging Face hub cannot be reached"
    text = str(error).replace(token, "***") if token else error
    return f"{source} cannot be fetched from the Hugging Face hub: {text}"


def reporter(source: str, report: Report) -> type[Any]:
    """A progress bar that draws nothing and reports each whole percent of the bytes on disk."""

    class Bar(tqdm):  # type: ignore[misc]  # tqdm ships no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # This bar of the hub counts bytes on disk; the others count packets and files.
            self.counts = str(kwargs.get("desc", "")).startswith("Reconstructing")
            self.percent = -1
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if not self.counts or not self.total:
                return
            percent = min(int(100 * self.n / self.total), 100)
            if percent > self.percent:
                self.percent = percent
                report(ProgressLine(step="fetch", message=f"fetching {source}", fraction=percent / 100))

    return Bar
