"""The controller is killed while adapters are added, replaced, split and removed.

Its state afterwards is that before or after the operation, never between; an acknowledged operation is
kept; and all files of every record are complete.
"""

from __future__ import annotations

import hashlib
import io
import random
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from policy.errors import TidegateError, Unreachable
from policy.wire.controller import AddAdapterRequest
from policy.wire.headers import SECRET_HEADER
from serve.adapters.status import AdapterStatus
from serve.controller.client import ControllerClient
from store.adapters import FILES
from store.artifact_manifest import ManifestFile, content_digest
from store.state_dir import StateDir
from tests.ports import free_ports
from tests.serve.sim_documents import document, sim_model
from tests.store.adapters.making import files, write

pytestmark = pytest.mark.process
WITHIN_S = 120.0
# An operation takes a few hundredths of a second; the kill comes before, in or after it.
LATEST_S = 0.06

# Of one name: the digest of each version that has a share, with that.
Standing = tuple[tuple[str, float], ...]


@dataclass
class Site:
    """Successive controllers over one state directory, and the state they should report."""

    state: StateDir
    address: str
    sources: list[Path]
    client: ControllerClient
    expected: dict[str, Standing] = field(default_factory=dict)
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.serve.lone_controller", str(self.state.root)]
        with (self.state.logs / "controller.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + WITHIN_S
        while True:
            with suppress(Unreachable):
                self.client.adapters()
                return
            assert self.process.poll() is None, (self.state.logs / "controller.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WITHIN_S)

    def says(self) -> dict[str, Standing]:
        found = self.client.adapters().adapters
        for adapter in found:
            for version in adapter.versions:
                assert self.digest(version.digest) == version.digest
        return {adapter.name: standing(adapter) for adapter in found}

    def digest(self, digest: str) -> str:
        url = f"http://{self.address}/adapters/blobs/{digest}"
        answer = httpx.get(url, headers={SECRET_HEADER: self.state.secret()}, trust_env=False)
        assert answer.status_code == 200, answer.text
        entries = {}
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            for name in FILES:
                file = archive.extractfile(name)
                assert file is not None
                data = file.read()
                entries[name] = ManifestFile(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        return content_digest(entries)


def standing(adapter: AdapterStatus) -> Standing:
    return tuple((version.digest, version.share) for version in adapter.versions if version.share)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    state = StateDir(tmp_path / "state").ensure()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    state.save(state.deployment_path, document(sim_model(adapters={}), cluster={"controller": address}))
    sources = [write(tmp_path / f"adapter-{seed}", files(seed)) for seed in range(4)]
    client = ControllerClient(address, state.secret())
    made = Site(state, address, sources, client)
    made.start()
    yield made
    made.kill()
    client.close()


def operations(site: Site, draw: random.Random) -> tuple[str, Callable[[], object], Standing | None]:
    """Operations, each with its alias and the split of the alias afterwards."""
    name = draw.choice(("sql", "law"))
    before = site.expected.get(name)
    client = site.client
    if before is not None and draw.random() < 0.3:
        return name, lambda: client.remove_adapter("m", name), None
    (adapter,) = [each for each in client.adapters().adapters if each.name == name] or [None]
    if adapter is not None and len(adapter.versions) > 1 and draw.random() < 0.4:
        one, other = adapter.versions[0], adapter.versions[1]
        weights = {f"v{one.number}": 1.0, f"v{other.number}": 3.0}
        after = ((one.digest, 0.25), (other.digest, 0.75))
        return name, lambda: client.split_adapter("m", name, weights), after
    path = draw.choice(site.sources)
    entries = {
        file: ManifestFile(size=0, sha256=hashlib.sha256((path / file).read_bytes()).hexdigest())
        for file in FILES
    }
    wanted = AddAdapterRequest(name=name, source=str(path))
    return name, lambda: client.add_adapter(wanted, lambda line: None), ((content_digest(entries), 1.0),)


def one_kill(site: Site, draw: random.Random) -> bool:
    """Run an operation, kill the controller meanwhile, and compare; returns whether it was acknowledged."""
    name, operation, after = operations(site, draw)
    acknowledged = threading.Event()

    def ask() -> None:
        # The connection was cut, or never accepted.
        with suppress(TidegateError):
            operation()
            acknowledged.set()

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(draw.uniform(0.0, LATEST_S))
    site.kill()
    asking.join(WITHIN_S)
    site.start()
    found = site.says()
    valid = [after] if acknowledged.is_set() else [site.expected.get(name), after]
    assert found.pop(name, None) in valid
    assert found == {other: shares for other, shares in site.expected.items() if other != name}
    site.expected = site.says()
    return acknowledged.is_set()


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.timeout(1800, func_only=True)
def test_killed_controller_keeps_names_consistent(site: Site, kills: int) -> None:
    draw = random.Random(kills)  # noqa: S311 - moments, no secrets
    for _ in range(kills):
        one_kill(site, draw)
    # An interrupted operation does not block the next one.
    alias = site.client.add_adapter(
        AddAdapterRequest(name="last", source=str(site.sources[0])), lambda line: None
    )
    assert site.says()["last"] == ((alias.versions[0].digest, 1.0),)
