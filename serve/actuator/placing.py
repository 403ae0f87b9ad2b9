"""What Serve says of replicas that Ray has found no node for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Serve says so after half a minute, in a sentence that has no other form.
_RESOURCES = re.compile(r"each replica: (?P<each>\{.*?\}), total resources available: (?P<free>\{.*?\})")


def unplaced(deployment: Mapping[str, Any]) -> str:
    """Why replicas of a deployment, as Serve's REST API shows it, wait for a node; or an empty string.

    Source: ``ray.serve.schema.DeploymentDetails``.
    """
    waiting = [
        replica
        for replica in deployment["replicas"]
        if replica["state"] == "STARTING" and not replica.get("node_id")
    ]
    found = _RESOURCES.search(deployment["message"])
    if not waiting or found is None:
        return ""
    return f"no node has room for {len(waiting)} of {found['each']}: {found['free']} is free"
