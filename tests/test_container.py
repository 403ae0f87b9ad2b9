"""The container file: both targets unprivileged, pinned, healthy by the admin port, from the lock files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tidegate.deployment_file import load

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "Dockerfile"
TARGETS = ("cpu", "gpu")


class Stage(NamedTuple):
    name: str
    base: str
    instructions: list[tuple[str, str]]

    def values(self, keyword: str) -> list[str]:
        return [value for key, value in self.instructions if key == keyword]

    def image(self) -> Stage:
        """The stage with what it inherits from the runtime stage that both images share."""
        assert self.base == "runtime"
        return self._replace(instructions=[*STAGES["runtime"].instructions, *self.instructions])


def parse(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """The global arguments and the stages by name, continuation lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, joined.splitlines())):
        keyword, _, value = line.partition(" ")
        if keyword == "FROM":
            base, _, name = value.partition(" AS ")
            last = stages[name] = Stage(name, base, [])
        elif not stages:
            assert keyword == "ARG"
            arguments.update([value.split("=", 1)])
        else:
            last.instructions.append((keyword, value))
    return arguments, stages


ARGUMENTS, STAGES = parse(DOCKERFILE.read_text())


def ancestry(name: str) -> list[Stage]:
    """The stage, what it is built on and what it copies from."""
    stage = STAGES[name]
    sources = [found for copy in stage.values("COPY") for found in re.findall(r"--from=(\S+)", copy)]
    parents = [each for each in (stage.base, *sources) if each in STAGES]
    return [stage, *(each for parent in parents for each in ancestry(parent))]


def test_every_image_that_comes_from_outside_is_pinned_to_a_patch_release() -> None:
    outside = {stage.base for stage in STAGES.values()} - STAGES.keys() - {"scratch"}
    assert outside == {"${PYTHON_IMAGE}"}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", ARGUMENTS["PYTHON_IMAGE"])


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_tidegate_without_privileges(target: str) -> None:
    stage = STAGES[target].image()
    assert stage.values("USER") == ["10001:10001"]
    assert [json.loads(value) for value in stage.values("ENTRYPOINT")] == [["tidegate"]]
    assert [json.loads(value) for value in stage.values("CMD")] == [["run", "/etc/tidegate/deployment.yaml"]]
    keywords = [key for key, _ in stage.instructions]
    assert "RUN" not in keywords[keywords.index("USER") :]


@pytest.mark.parametrize("target", TARGETS)
def test_state_and_cache_outlive_the_container(target: str) -> None:
    (volumes,) = STAGES[target].image().values("VOLUME")
    environment = " ".join(STAGES["base"].values("ENV"))
    for variable in ("TIDEGATE_STATE_DIR", "XDG_CACHE_HOME"):
        found = re.search(rf"{variable}=(\S+)", environment)
        assert found is not None
        assert found[1] in json.loads(volumes)


@pytest.mark.parametrize("target", TARGETS)
def test_health_is_the_admin_port(target: str) -> None:
    (check,) = STAGES[target].image().values("HEALTHCHECK")
    command = json.loads(check.partition(" CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "healthcheck", "exec")
    assert "/livez" in command[2]
    assert "TIDEGATE_ADMIN=http://127.0.0.1:8081" in " ".join(STAGES["base"].values("ENV"))


def test_the_files_own_example_serves_on_the_port_it_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(
        r"^#   docker run (.*?tidegate:[\d.]+-cpu)$", DOCKERFILE.read_text(), re.DOTALL | re.MULTILINE
    )
    (mounted,) = re.findall(r"\$PWD/(\S+?):(\S+?):ro", command)
    # State and cache outlive the container, and a stop leaves time to drain.
    assert set(re.findall(r"-v [\w-]+:(\S+)", command)) == set(
        json.loads(STAGES["runtime"].values("VOLUME")[0])
    )
    assert "--stop-timeout 180" in command
    (published,) = re.findall(r"-p 127\.0\.0\.1:\d+:(\d+)", command)
    assert mounted[1] in STAGES["runtime"].values("CMD")[0]
    assert published in STAGES["runtime"].values("EXPOSE")
    monkeypatch.delenv("TIDEGATE_ADMIN_HOST", raising=False)
    for name, value in re.findall(r"(TIDEGATE_\w+)=(\S+)", " ".join(STAGES["base"].values("ENV"))):
        monkeypatch.setenv(name, value)
    gateway = load(ROOT / mounted[0]).deployment.gateway
    assert (gateway.host, gateway.port) == ("0.0.0.0", int(published))
    assert gateway.admin_host == "127.0.0.1"


def test_the_docs_the_compose_files_and_the_chart_name_one_image() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    names = {f"tidegate:{version}-{target}" for target in TARGETS}
    found = set[str]()
    for path in (
        DOCKERFILE,
        ROOT / "docs" / "install.md",
        *(ROOT / "deployments" / "compose").glob("*.yaml"),
    ):
        here = set(re.findall(r"\btidegate:[\w.]+-?[cg]pu\b", path.read_text()))
        assert here, path
        found |= here
    assert found == names
    chart = yaml.safe_load((ROOT / "deployments" / "kubernetes" / "chart" / "Chart.yaml").read_text())
    assert chart["appVersion"] == version  # the chart adds -cpu or -gpu


@pytest.mark.parametrize("target", TARGETS)
def test_packages_come_from_the_lock_file_alone(target: str) -> None:
    installs = [
        command
        for stage in ancestry(target)
        for run in stage.values("RUN")
        for command in run.split("&&")
        if "pip install" in command
    ]
    assert any(f"-r requirements/{target}.txt" in command for command in installs)
    assert all("--no-deps" in command for command in installs)


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    for stage in STAGES.values():
        for copy in stage.values("COPY"):
            if copy.startswith("--from="):
                continue
            *sources, _ = copy.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(Path(source).match(rule) for rule in allowed), source


def test_every_package_that_the_command_line_imports_is_copied() -> None:
    copied = {word for copy in STAGES["sources"].values("COPY") for word in copy.split()}
    assert {"policy", "store", "gateway", "serve", "tidegate"} <= copied
    for target in TARGETS:
        assert STAGES[f"{target}-build"].values("COPY") == ["--from=sources /src ./"]


@pytest.mark.slow
def test_the_linter_agrees() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed: requirements/dev.txt has it")
    done = subprocess.run([linter, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
