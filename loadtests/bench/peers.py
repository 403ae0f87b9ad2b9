"""The routers that Tidegate is measured beside: each in a virtual environment of its own.

They are made on demand in a folder that the user names, from the lists in ``requirements/``; one that
is there already is used as it is.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"


@dataclass(frozen=True)
class Peer:
    """A router for OpenAI-compatible servers and the policies of it that are measured.

    ``launch`` is what its interpreter runs; ``flags`` are given in every run.
    """

    name: str
    launch: tuple[str, ...]
    policies: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @property
    def requirements(self) -> Path:
        """What pip installs."""
        return REQUIREMENTS / f"{self.name}.txt"

    def python(self, folder: Path) -> Path:
        """The interpreter of its environment in ``folder``."""
        return folder / self.name / "bin" / "python"

    def installed(self, folder: Path) -> bool:
        """Whether its environment is there and complete."""
        python = self.python(folder)
        if not python.exists():
            return False
        asked = subprocess.run([python, *self.launch, "--help"], capture_output=True, timeout=60, check=False)
        return asked.returncode == 0

    def install(self, folder: Path) -> None:
        """Make its environment; raises ``subprocess.CalledProcessError`` when pip cannot."""
        if not self.python(folder).exists():
            venv.create(folder / self.name, with_pip=True)
        pip = [str(self.python(folder)), "-m", "pip", "install", "--quiet", "-r", str(self.requirements)]
        subprocess.run(pip, check=True, stdout=sys.stderr)

    def argv(
        self, python: Path, policy: str, urls: Sequence[str], port: int, metrics: int, *, retries: bool
    ) -> list[str]:
        """The command line: one worker, no access log, ``retries`` as they come or off."""
        return [
            str(python),
            *self.launch,
            *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls),
            *("--policy", policy, "--prometheus-port", str(metrics)),
            *self.flags,
            *(() if retries else ("--disable-retries",)),
        ]


PEERS = (
    Peer(
        "vllm-router",
        ("-m", "vllm_router.launch_router"),
        ("round_robin", "cache_aware", "consistent_hash"),
        ("--log-level", "warning"),
    ),
    Peer(
        "smg",
        ("-m", "smg.launch_router"),
        ("round_robin", "cache_aware", "prefix_hash"),
        ("--log-level", "warn"),
    ),
    Peer(
        "sglang-router",
        ("-m", "sglang_router.launch_router"),
        ("round_robin", "cache_aware"),
        ("--log-level", "warn"),
    ),
)


def available(folder: Path | None, wanted: Sequence[Peer]) -> tuple[dict[str, Path], dict[str, str]]:
    """Interpreters of the peers that can run, and for the others why not; missing ones are installed."""
    pythons: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    for peer in wanted:
        if folder is None:
            left_out[peer.name] = "no --peers-dir"
            continue
        try:
            if not peer.installed(folder):
                sys.stderr.write(f"installing {peer.name} into {folder}\n")
                peer.install(folder)
            if peer.installed(folder):
                pythons[peer.name] = peer.python(folder)
            else:
                left_out[peer.name] = "it was installed, but does not start"
        except (OSError, subprocess.SubprocessError) as error:
            left_out[peer.name] = str(error)
    return pythons, left_out
