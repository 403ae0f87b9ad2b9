"""The installer's decisions, with an interpreter that only writes down what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STATE = "-m store.compiled_modules"
RECORDER = """#!/bin/sh
echo "$*" >> {log}
case "$*" in *--dry-run*) exit {dry_run} ;; *compiled_modules) echo state; exit {compiled} ;; esac
"""


class Checkout:
    """A checkout with a recording interpreter in its .venv."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "calls.log"
        (root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "install", root / "scripts" / "install")
        shutil.copytree(ROOT / "requirements", root / "requirements")
        shutil.copy(ROOT / "pyproject.toml", root)
        (root / ".venv" / "bin").mkdir(parents=True)
        self.interpreter()

    def interpreter(self, dry_run: int = 0, compiled: int = 0) -> None:
        path = self.root / ".venv" / "bin" / "python"
        path.write_text(RECORDER.format(log=self.log, dry_run=dry_run, compiled=compiled))
        path.chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        env = {"PATH": os.environ["PATH"], "TIDEGATE_ENGINE": "cpu"} | environment
        command = [str(self.root / "scripts" / "install"), *arguments]
        return subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )

    @property
    def calls(self) -> list[str]:
        """What was asked of the interpreter; whether it is compiled, which each run asks, aside."""
        return [call for call in self.log.read_text().splitlines() if call != STATE]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_second_run_installs_nothing(checkout: Checkout) -> None:
    first = checkout.run()
    assert first.returncode == 0, first.stderr
    assert any("-r requirements/cpu.txt" in call for call in checkout.calls)
    assert "-e ." in checkout.calls[-1]
    checkout.run()
    assert checkout.calls == []


def test_every_run_compiles_what_has_changed(checkout: Checkout) -> None:
    checkout.run()
    checkout.interpreter(compiled=2)
    done = checkout.run()
    (call,) = checkout.calls
    assert call.endswith("--no-build-isolation -e .")
    assert "compiling the request path again" in done.stdout


def test_where_nothing_can_be_compiled_it_says_so_and_goes_on(checkout: Checkout) -> None:
    checkout.run()
    checkout.interpreter(compiled=1)
    done = checkout.run()
    assert (done.returncode, checkout.calls) == (0, [])
    assert "install: state" in done.stdout


def test_a_changed_lock_file_installs_again(checkout: Checkout) -> None:
    checkout.run()
    with (checkout.root / "requirements" / "cpu.txt").open("a") as file:
        file.write("zzz==1\n")
    checkout.run()
    assert any("-r requirements/cpu.txt" in call for call in checkout.calls)


def test_torch_comes_from_where_pip_is_configured_to_look(checkout: Checkout) -> None:
    done = checkout.run()
    assert "torch==2.13.0+cpu is found by pip's own configuration" in done.stdout
    assert not any("--index-url" in call for call in checkout.calls)


def test_torch_comes_from_its_own_index_otherwise(checkout: Checkout) -> None:
    checkout.interpreter(dry_run=1)
    done = checkout.run()
    assert "torch==2.13.0+cpu comes from https://download.pytorch.org/whl/cpu" in done.stdout
    (call,) = [call for call in checkout.calls if "--index-url" in call]
    assert call.endswith("--index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu")


def test_the_gpu_set_is_chosen_by_the_environment(checkout: Checkout) -> None:
    checkout.run(TIDEGATE_ENGINE="gpu")
    assert any("-r requirements/gpu.txt" in call for call in checkout.calls)
    assert not any("cpu" in call for call in checkout.calls)


def test_the_development_set_is_added_once(checkout: Checkout) -> None:
    checkout.run()
    checkout.run("--dev")
    (call,) = checkout.calls
    assert call.endswith("-r requirements/loadtest.txt -r requirements/dev.txt")
    checkout.run("--dev")
    assert checkout.calls == []


def test_a_failed_installation_is_tried_again(checkout: Checkout) -> None:
    python = checkout.root / ".venv" / "bin" / "python"
    good = python.read_text()
    python.write_text("#!/bin/sh\nexit 7\n")
    assert checkout.run().returncode != 0
    python.write_text(good)
    checkout.run()
    assert any("-r requirements/cpu.txt" in call for call in checkout.calls)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--nonsense"], {}, "unknown argument --nonsense"),
        ([], {"TIDEGATE_ENGINE": "tpu"}, "TIDEGATE_ENGINE is 'tpu'; expected cpu or gpu"),
    ],
)
def test_what_it_cannot_do_it_says(
    checkout: Checkout, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = checkout.run(*arguments, **environment)
    assert done.returncode == 1
    assert message in done.stderr
    assert checkout.calls == []


def test_no_suitable_python_is_a_clear_error(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / ".venv")
    done = checkout.run(PYTHON="python-that-is-not-there")
    assert done.returncode == 1
    assert "no Python 3.11 or 3.12 found (tried: python-that-is-not-there)" in done.stderr
    assert not (checkout.root / ".venv").exists()
