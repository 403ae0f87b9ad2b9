"""What tests of all rooms share: how hypothesis looks for examples."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A machine that others use stands still for longer than hypothesis' limits allow, and who broke nothing
# shall not be told of an example that nobody had met before: each run looks at the same ones.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")
