"""The Hugging Face hub, with its client's one function replaced: arguments, progress, refusals."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub import errors
from huggingface_hub.errors import HfHubHTTPError

from policy.errors import AdapterRefused, ModelUnavailable
from store.adapters import from_hub
from store.adapters.fetch_context import FetchJob
from store.model_weights import hub_source
from store.model_weights.hub_source import prepare_hub
from store.progress_report import ProgressLine

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Answer:
    """The part of an HTTP response that the client's errors read."""

    def __init__(self, status: int) -> None:
        self.status_code = status
        self.headers: dict[str, str] = {}
        self.request = None


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / COMMIT
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def replace(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        seen.update(options, repo=repo)
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return seen


def test_a_snapshot_is_used_in_the_cache_of_the_hub(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    seen = replace(monkeypatch, snapshot)
    prepared = prepare_hub("org/model", token_file=None, report=lambda _: None)
    assert (prepared.path, prepared.digest) == (snapshot, COMMIT)
    assert (seen["repo"], seen["revision"], seen["token"]) == ("org/model", None, None)
    assert "*.safetensors" in seen["allow_patterns"]
    assert not {"*.bin", "*.py"} & set(seen["allow_patterns"])


def test_revision_and_token_are_used(monkeypatch: pytest.MonkeyPatch, snapshot: Path, tmp_path: Path) -> None:
    seen = replace(monkeypatch, snapshot)
    (tmp_path / "token").write_text("hf_abc\n")
    prepare_hub("org/model@v1.0", token_file=str(tmp_path / "token"), report=lambda _: None)
    assert (seen["revision"], seen["token"]) == ("v1.0", "hf_abc")


def test_bytes_are_reported_in_whole_percents(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    seen = replace(monkeypatch, snapshot)
    reports: list[ProgressLine] = []
    prepare_hub("org/model", token_file=None, report=reports.append)
    reports.clear()
    disk = seen["tqdm_class"](desc="Reconstructing (incomplete total...)", total=0, unit="B")
    network = seen["tqdm_class"](desc="Downloading bytes", total=0, unit="B")
    disk.total = network.total = 1000
    for _ in range(100):
        network.update(10)
        disk.update(5)
    with seen["tqdm_class"](desc="Fetching 3 files", total=3) as bar:
        bar.update(1)
    assert [each.fraction for each in reports] == [percent / 100 for percent in range(51)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("no"), "cannot be reached"),
        (
            errors.RepositoryNotFoundError("no", response=Answer(401)),
            "does not exist .*, or it needs a token",
        ),  # type: ignore[arg-type]
        (errors.RevisionNotFoundError("no", response=Answer(404)), "no such revision"),  # type: ignore[arg-type]
        (errors.GatedRepoError("no", response=Answer(403)), "it needs a token: set token_file"),  # type: ignore[arg-type]
        (HfHubHTTPError("no", response=Answer(401)), "or it needs a token"),  # type: ignore[arg-type]
        (HfHubHTTPError("busy", response=Answer(503)), "cannot be fetched .*: busy"),  # type: ignore[arg-type]
        (OSError("disk full"), "cannot be fetched .*: disk full"),
    ],
)
def test_errors_name_the_remedy(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    replace(monkeypatch, error)
    with pytest.raises(ModelUnavailable, match=message):
        prepare_hub("org/model", token_file=None, report=lambda _: None)


def test_the_token_appears_in_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace(monkeypatch, OSError("header Authorization: Bearer hf_abc"))
    (tmp_path / "token").write_text("hf_abc")
    reports: list[ProgressLine] = []
    with pytest.raises(ModelUnavailable) as caught:
        prepare_hub("org/model", token_file=str(tmp_path / "token"), report=reports.append)
    assert "Bearer ***" in str(caught.value)
    assert not any("hf_abc" in each.message for each in reports)


@pytest.mark.parametrize("content", [None, " \n"])
def test_a_token_file_without_a_token_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelUnavailable, match=r"token_file .*/token (is empty|cannot be read)"):
        prepare_hub("org/model", token_file=str(path), report=lambda _: None)


def test_a_snapshot_without_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    replace(monkeypatch, snapshot)
    with pytest.raises(ModelUnavailable, match=r"lacks \*.safetensors"):
        prepare_hub("org/model", token_file=None, report=lambda _: None)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that accepts connections and answers nothing, and a short patience with it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(
            huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}"
        )
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(hub_source, "SILENT_S", 0.05)
        yield


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_silent_hub_is_given_up(silent: None, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="cannot be reached"):
        prepare_hub("org/model-of-nobody", token_file=None, report=lambda _: None)
    with pytest.raises(AdapterRefused, match="timed out"):
        from_hub.fetch(FetchJob("hf:org/adapter", tmp_path, tmp_path, 1000, lambda _: None))
    session = huggingface_hub.get_session()
    hub_source.limit_silence()
    assert huggingface_hub.get_session() is session, "replaced once"
