"""The entry point of an engine's process: ``python -m serve.engine.main --events FD``.

vLLM starts its own processes by importing this module again, so it imports little.
"""

from __future__ import annotations

import argparse

from store import compiled_modules

# What each token takes. The rest runs from the sources, which the simulator extends.
COMPILED = ("serve", "policy.wire")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serve.engine.main", description=__doc__)
    parser.add_argument("--events", type=int, required=True, help="the file descriptor that events go to")
    given = parser.parse_args()
    compiled_modules.use(COMPILED)
    # Only now: what it imports is either compiled or not.
    from serve.engine.engine_server import serve  # noqa: PLC0415

    serve(given.events)


if __name__ == "__main__":
    main()
