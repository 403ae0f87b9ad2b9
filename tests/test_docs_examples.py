"""The examples in the docs are valid: YAML by what reads it, commands by their own parsers."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from urllib.parse import urlsplit

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner

from gateway.api.application import admin_app, client_app
from policy.config.deployment import GatewayConfig, ModelSpec
from policy.deployment_file.parse import parse
from sim.simulator.fault_scenario import FaultScenario, scenario_of
from sim.workload.workload_spec import parse_workload
from tests.test_docs import BLOCK, PAGES, ROOT, blocks
from tidegate.cli import group

MODEL = {"name": "m", "source": "org/m", "shapes": {"s": {"gpus": 1}}, "modes": {"o": {"shape": "s"}}}
OF_A_MODEL = {field.encode_name for field in msgspec.structs.fields(ModelSpec)}
OF_A_SCENARIO = {field.encode_name for field in msgspec.structs.fields(FaultScenario)}
# Read by Prometheus.
FOREIGN = {"scrape_configs"}
LANGUAGES = {"sh", "console", "text", "yaml", "json", "toml", "python"}
# Programs of others, which the tests do not have or would have to start.
PROGRAMS = {
    "cat", "chmod", "claude", "docker", "export", "git", "helm", "kubectl", "mkdir", "nft", "openssl", "pip",
    "ray", "sleep", "useradd", "vllm",
}  # fmt: skip
_INLINE = re.compile(r"`(?:\.venv/bin/)?tidegate ([a-z][^`]*)`")
_PROGRAM = re.compile(r"`(?:\.venv/bin/)?((?:python -m|pytest|locust|curl) [^`]*)`")
_ASSIGNMENT = re.compile(r"^\w+=(\$\(.*?\)|\S*) *")
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


class Parsed(Exception):
    """The options were valid."""


@by_page
def test_every_block_says_its_language(page: Path) -> None:
    assert {language for _, language, _ in BLOCK.findall(page.read_text())} <= LANGUAGES


@by_page
def test_yaml_is_accepted_by_what_reads_it(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        document = yaml.safe_load(block)
        if "models" in document:
            parse(document)
        elif "mix" in document:
            parse_workload(document, page.parent)
        elif document.keys() <= OF_A_SCENARIO:
            (tmp_path / "scenario.yaml").write_text(block)
            scenario_of(tmp_path / "scenario.yaml", [])
        elif not document.keys() <= FOREIGN:
            # A profile in a file is read with the deployment file that names it.
            inner = {key: document[key] for key in document.keys() & OF_A_MODEL - {"profile"}}
            outer = {key: value for key, value in document.items() if key not in OF_A_MODEL}
            parse({"models": [MODEL | inner], **outer})


@by_page
def test_json_toml_and_python_are_well_formed(page: Path) -> None:
    for block in blocks(page, "json"):
        rest = block.strip()
        while rest:
            _, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].strip()
    for block in blocks(page, "toml"):
        tomllib.loads(block)
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


@by_page
def test_commands_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed_only)
    monkeypatch.chdir(tmp_path)
    for words in command_lines(page):
        check_command(words, tmp_path, monkeypatch)


@by_page
def test_inline_commands_and_options_exist(page: Path) -> None:
    for text in _INLINE.findall(BLOCK.sub("", page.read_text())):
        with click.Context(group, info_name="tidegate") as context:
            command: click.Command = group
            words = shlex.split(text)
            while isinstance(command, click.Group) and words and not words[0].startswith("-"):
                found = command.get_command(context, words.pop(0))
                if found is None:
                    assert command is not group, f"{page.name}: {text}"
                    break
                command = found
            options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        named = {word.partition("=")[0] for word in words if word.startswith("-") and word != "->"}
        assert named <= options | {"--help"}, f"{page.name}: {text}"


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/tuning/*.svg")), ids=lambda picture: picture.name)
def test_a_picture_shows_what_its_command_draws(
    picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers, about: each change of routing or admission moves them a little."""
    monkeypatch.chdir(ROOT)
    place = str(picture.relative_to(ROOT))
    (words,) = (words for words in command_lines(ROOT / "docs" / "tuning.md") if words[-1] == place)
    drawn = tmp_path / picture.name
    result = CliRunner().invoke(group, [*words[1:-1], str(drawn)])
    assert result.exit_code == 0, result.output
    now, shown = legend(drawn), legend(picture)
    assert list(now) == list(shown)
    for name, (attainment, gpu_hours) in shown.items():
        assert now[name] == (pytest.approx(attainment, abs=3), pytest.approx(gpu_hours, rel=0.05)), name


def legend(picture: Path) -> dict[str, tuple[float, float]]:
    """The attainment in percent and the GPU-hours of each run in a chart of ``tidegate simulate``."""
    found = re.findall(r">([^<>]+): ([\d.]+)% within the SLO, ([\d.]+) GPU-hours<", picture.read_text())
    return {name: (float(attainment), float(gpu_hours)) for name, attainment, gpu_hours in found}


def command_lines(page: Path) -> Iterator[list[str]]:
    """The commands of a page: its blocks, and inline Python programs."""
    lines = []
    for block in blocks(page, "sh"):
        lines += block.replace("\\\n", " ").splitlines()
    for block in blocks(page, "console"):
        lines += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    lines += _PROGRAM.findall(BLOCK.sub("", page.read_text()))
    for line in lines:
        if words := shlex.split(_ASSIGNMENT.sub("", line), comments=True):
            yield words[:-1] if words[-1] == "&" else words


def check_command(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = words
    match program.removeprefix(".venv/bin/"):
        case "tidegate":
            make_files(rest, folder)
            with click.Context(group, info_name="tidegate") as context:
                name, command, words = group.resolve_command(context, rest)
                assert command is not None
                command.make_context(name, words, parent=context).close()
        case "make":
            assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        case "python" if rest[0] == "-m":
            assert '__name__ == "__main__"' in (ROOT / f"{rest[1].replace('.', '/')}.py").read_text(), words
            # Without options there may be no parser.
            if rest[2:]:
                make_files(rest, folder)
                monkeypatch.setattr(sys, "argv", rest[1:])
                with pytest.raises(Parsed):
                    importlib.import_module(rest[1]).main()
        case "python":
            assert (ROOT / rest[0]).exists(), words
        case "pytest":
            paths = [word for word in rest if word.startswith("tests/")]
            assert paths and all((ROOT / path).exists() for path in paths), words
        case "locust":
            assert rest[0] == "-f" and (ROOT / rest[1]).exists()
            assert {word for word in rest if word.startswith("-")} <= locust_options(), words
        case "curl":
            (url,) = (urlsplit(word) for word in rest if word.startswith("http://"))
            assert any(re.fullmatch(path, url.path) for path in served()), words
        case "docker":
            files = [word for word in rest if word.startswith("deployments/")]
            assert all((ROOT / file).exists() for file in files), words
            targets = [rest[at + 1] for at, word in enumerate(rest) if word == "--target"]
            assert all(f" AS {target}\n" in (ROOT / "Dockerfile").read_text() for target in targets), words
        case "scripts/install" | "scripts/check" | "scripts/test" | "scripts/lock":
            assert (ROOT / program).exists()
        case "cp":
            assert (ROOT / rest[0]).exists(), words
        case other:
            assert other in PROGRAMS, words


def make_files(words: list[str], folder: Path) -> None:
    """Some options require a file that exists."""
    for word in words:
        if word.endswith((".yaml", ".json", ".jsonl", ".csv", ".svg")):
            (folder / word).parent.mkdir(parents=True, exist_ok=True)
            (folder / word).touch()


def parsed_only(parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
    """In place of ``parse_args``: refuse what it refuses, and go no further."""
    _, unknown = parser.parse_known_args(*arguments)
    assert not unknown, unknown
    raise Parsed


def locust_options() -> set[str]:
    """Locust's options and those of loadtests/, as written: locust changes a process that imports it."""
    spec = importlib.util.find_spec("locust")
    assert spec is not None and spec.origin is not None
    sources = Path(spec.origin).with_name("argument_parser.py"), ROOT / "loadtests" / "options.py"
    return {option for source in sources for option in re.findall(r'"(--?[a-z][a-z-]*)"', source.read_text())}


def served() -> set[str]:
    """The paths of both ports, as expressions."""
    unused: Any = SimpleNamespace()
    apps = client_app(unused, lambda *asgi: unused), admin_app(unused, str, GatewayConfig)
    return {re.sub(r"\{\w+\}", "[^/]+", path) for app in apps for path in app.openapi()["paths"]}
