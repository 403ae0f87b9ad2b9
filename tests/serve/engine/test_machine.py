"""The description of the machine of an engine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from policy.types import EngineKind
from serve.engine.engine_server import describe_machine
from tests.serve.sim_driver import spec


def test_the_description_of_a_cpu_machine_names_its_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\n")
    on_cpus = msgspec.structs.replace(spec(), kind=EngineKind.VLLM, cpus=2)
    described = describe_machine(on_cpus, cpuinfo=info)
    assert described.startswith("2 of ")
    assert described.endswith(" cores of Fast CPU @ 3 GHz")
    assert describe_machine(on_cpus, cpuinfo=tmp_path / "none")
