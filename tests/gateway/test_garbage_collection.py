"""A worker's garbage collector looks at few objects at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The most objects that a collection of the survivors of others looks at, while all that is made is kept, and
# how often all are looked at.
SURVIVORS = """
import gc
from gateway.garbage_collection import collect_seldom
sizes, full = [0], 0
def look(phase, info):
    global full
    full += phase == "start" and info["generation"] == 2
    if phase == "start" and info["generation"] == 1 and len(kept) < 250_000:
        sizes.append(len(gc.get_objects(0)) + len(gc.get_objects(1)))
kept = []
collect_seldom()
gc.callbacks.append(look)
for number in range(1_700_000):
    kept.append([number])
print(max(sizes), full)
"""

# Whether a cycle that survived is gone, by the connections that are open and the other objects that survived.
QUIET = """
import gc, weakref
from gateway import garbage_collection as module
module.MOST_SURVIVORS = 1000
module.collect_seldom()
class Cycle: pass
def is_found(connections, others):
    cycle, kept = Cycle(), [[number] for number in range(others)]
    cycle.itself, held = cycle, weakref.ref(cycle)
    gc.collect(1)
    del cycle
    module.collect_if_quiet(connections)
    return held() is None
gc.collect(1)
module.collect_if_quiet(0)
before = gc.get_stats()[2]["collections"]
module.collect_if_quiet(0)
more = gc.get_stats()[2]["collections"] - before
print(more, is_found(0, 0), is_found(module.MOST_CONNECTIONS + 1, 0), is_found(0, 2000))
"""


def printed(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.slow
def test_a_collection_looks_at_a_bounded_number_of_survivors_and_never_at_all_under_load() -> None:
    most, full = map(int, printed(SURVIVORS).split())
    assert 5_000 < most < 20_000
    assert full == 0


def test_all_are_looked_at_in_a_quiet_moment_if_there_is_anything_new() -> None:
    assert printed(QUIET) == "0 True False False"
