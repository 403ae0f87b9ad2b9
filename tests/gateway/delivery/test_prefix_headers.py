"""The headers by which a replica learns the prefixes of a prompt."""

from __future__ import annotations

import pytest

from gateway.delivery.retry_loop import prefix_headers
from policy.request import Request


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ((2, 4, 6), b"x-tidegate-prefix: 2,4,6\r\nx-tidegate-depths: 0,0,10,20,30,45\r\n"),
        ((6,), b"x-tidegate-prefix: 6\r\nx-tidegate-depths: 4,20,30,45\r\n"),
        ((6, 9), b"x-tidegate-prefix: 6,9\r\nx-tidegate-depths: 4,20,30,45\r\n"),
        ((), b"x-tidegate-depths: 6,30,45\r\n"),
    ],
)
def test_a_replica_is_told_which_prefixes_are_new_and_how_deep_they_are(
    new: tuple[int, ...], expected: bytes
) -> None:
    request = Request("m", prompt_tokens=45, prefix=(2, 4, 6), depths=(10, 20, 30))
    assert prefix_headers(request, new) == expected
