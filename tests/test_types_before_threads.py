"""Types that threads decode are known to msgspec when a process begins: two first uses at once can crash."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tidegate.supervisor.children import ROOT

# What threads of a process decode or convert to, by the module that the process imports first.
DECODED = {
    "gateway.accounting.main": (
        *(f"policy.wire.accounting_api:{name}" for name in (
            "AuditEntry", "AuditQuery", "CreateAdminKey", "CreateKey", "CreateTenant", "RotateKey"
        )),
        "policy.config.tenancy:AccessPolicy",
        "policy.config.tenancy:Tenant",
        "policy.tenancy.usage_slot:UsageDims",
        "policy.wire.usage_query:UsageQuery",
    ),
    "gateway.worker": ("gateway.telemetry.exemplars:Exemplar",),
    "serve.controller.process": (
        "policy.scaling.decision_types:Decision",
        "policy.scaling.policies.registry:Predictive",
        "policy.scaling.view:Proposal",
        "policy.wire.accounting_api:AuditEntry",
        "serve.autoscaler.decision_journal:DecisionRound",
        "serve.controller_api_schema:SwitchOutcome",
        "store.adapters.adapter_aliases:_Declared",
        "store.adapters.tensors:_Entry",
        "store.artifact_manifest:Manifest",
    ),
    "tidegate.supervisor.supervisor": (
        "policy.scaling.policies.registry:Predictive",
        "policy.scaling.view:Proposal",
        "policy.types:FleetSnapshot",
        "policy.wire.controller:LeaderStatus",
        "serve.controller_api_schema:ControllerStatus",
    ),
}  # fmt: skip

# msgspec keeps what it knows of a structure out of sight of Python, and of a data class beside its members.
CHECK = """
import gc, sys
from importlib import import_module

first, *names = sys.argv[1:]
import_module(first)
for name in names:
    module, _, kind = name.partition(":")
    found = getattr(import_module(module), kind)
    known = "__msgspec_cache__" in vars(found)
    if not known and not any(type(each).__name__ == "StructInfo" for each in gc.get_referents(found)):
        print(name)
"""


@pytest.mark.parametrize("process", DECODED)
def test_types_that_threads_decode_are_known_at_the_start(process: str) -> None:
    command = [sys.executable, "-c", CHECK, process, *DECODED[process]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
