"""What limits cost a request: to admit and settle one, with all four limits of key and tenant, or with none.

``python loadtests/limits_cost.py [ROOT]`` measures the compiled modules of the checkout ROOT
(``scripts/install`` there), by default this one. Processor time, medians.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

WORKERS = 2


def measure(path: Path) -> None:
    """Print both figures, with :data:`WORKERS` workers that count the same key and tenant."""
    from gateway.intake.principal import Principal, TenantAccount  # noqa: PLC0415 - of that checkout
    from gateway.intake.rate_limiter import RateLimiter  # noqa: PLC0415
    from gateway.intake.shared_limits import SharedLimits  # noqa: PLC0415
    from loadtests.telemetry_cost import nanoseconds  # noqa: PLC0415
    from policy.config.tenancy import Access  # noqa: PLC0415

    limited = Access(
        rpm_limit=1_000_000_000, tpm_limit=1_000_000_000_000, max_parallel_requests=100, max_budget=1e9
    )
    limiters = [RateLimiter(SharedLimits(path, row)) for row in range(WORKERS)]
    account = TenantAccount("web", b"")
    principal = Principal(account, "key-0123456789abcdef", (limited, limited))
    for limiter in limiters:
        limiter.admit(principal, 1000, 1000).settle(500, 500, began=True)
    first = limiters[0]

    def request() -> None:
        first.admit(principal, 1000, 1000).settle(500, 500, began=True)

    # Without limits a request only looks whether it has any.
    free = Principal(account, "key-0123456789abcdef", (Access(), Access()))
    found = nanoseconds(request), nanoseconds(lambda: free.limited)
    print("{:.0f} ns a request, {:.0f} ns without limits".format(*found))  # noqa: T201 - its result


def main() -> int:
    """Measure; returns 1 if the checkout is not compiled."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    sys.path.insert(0, str(root))
    from store import machine_code  # noqa: PLC0415

    if problem := machine_code.use():
        print(f"{root} is not compiled: {problem}", file=sys.stderr)  # noqa: T201
        return 1
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory) / "limits.rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
