"""Records come out of frames as they went in, however these are cut; anything else breaks them."""

from __future__ import annotations

import itertools
from struct import pack, unpack_from

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.wire import frames
from policy.wire.frames import (
    FULL_FRAME,
    MAX_FRAME,
    MAX_PAYLOAD,
    BrokenFrames,
    FrameDecoder,
    FrameEncoder,
    Record,
)  # fmt: skip

KINDS = st.sampled_from([frames.REQUEST, frames.DATA, frames.END, frames.WINDOW, 255])
# Of any payload, and of those around the longest.
PAYLOADS = st.binary(max_size=40) | st.sampled_from([0, 1, MAX_PAYLOAD - 1, MAX_PAYLOAD]).map(bytes)
RECORDS = st.lists(st.tuples(KINDS, st.integers(0, 2**32 - 1), PAYLOADS), max_size=12)


def frame(*records: Record, sequence: int = 0) -> bytes:
    """One frame, written as the format says."""
    text = b"".join(pack(">BII", kind, stream, len(payload)) + payload for kind, stream, payload in records)
    return pack(">II", len(text) + 4, sequence) + text


@pytest.mark.slow
@given(st.lists(RECORDS, max_size=4), st.lists(st.integers(0, 10**6), max_size=12))
def test_any_records_survive_any_cut(turns: list[list[Record]], cuts: list[int]) -> None:
    encoder, decoder, sent = FrameEncoder(), FrameDecoder(), b""
    for records in turns:
        assert encoder.empty
        for record in records:
            encoder.add(*record)
        sent += encoder.take()
    edges = [0, *sorted(cut % (len(sent) + 1) for cut in cuts), len(sent)]
    parts = [sent[start:end] for start, end in itertools.pairwise(edges)]
    assert list(itertools.chain(*map(decoder.feed, parts))) == list(itertools.chain(*turns))


@pytest.mark.slow
@given(st.lists(RECORDS, max_size=4), st.integers(1, 5))
def test_records_can_be_had_some_at_a_time(turns: list[list[Record]], most: int) -> None:
    encoder, decoder, sent = FrameEncoder(), FrameDecoder(), b""
    for records in turns:
        for record in records:
            encoder.add(*record)
        sent += encoder.take()
    parts = [decoder.feed(sent, most)]
    while len(parts[-1]) == most:
        parts.append(decoder.feed(b"", most))
    assert list(itertools.chain(*parts)) == list(itertools.chain(*turns))
    assert decoder.feed(encoder.take()) == []


def test_records_of_a_turn_leave_in_one_frame_until_it_is_full() -> None:
    encoder = FrameEncoder()
    encoder.add(frames.DATA, 1, b"ab")
    encoder.add(frames.END, 2, b"")
    assert encoder.take() == frame((frames.DATA, 1, b"ab"), (frames.END, 2, b""))
    assert encoder.take() == b""
    full = (frames.DATA, 3, bytes(MAX_PAYLOAD))
    for _ in range(3):
        encoder.add(*full)
    assert encoder.take() == b"".join(frame(full, sequence=number) for number in (1, 2, 3))


def test_a_payload_may_follow_its_frame() -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder()
    head = encoder.alone(frames.BODY, 7, 5)
    encoder.add(frames.CANCEL, 7, b"")
    assert decoder.feed(head + b"part!") == [(frames.BODY, 7, b"part!")]
    assert decoder.feed(encoder.take()) == [(frames.CANCEL, 7, b"")]


def test_the_sequence_goes_on_after_32_bits() -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder()
    encoder._sequence = decoder._sequence = 2**32 - 1
    for number in range(2):
        encoder.add(frames.DATA, number, b"")
        assert decoder.feed(encoder.take()) == [(frames.DATA, number, b"")]


def test_the_tokens_of_many_streams_leave_in_frames_that_take_little_time_each() -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder()
    sent = [(frames.DATA, number, b"x" * 190) for number in range(1, 601)]
    sent.insert(300, (frames.DATA, 601, b"y" * MAX_PAYLOAD))
    for record in sent:
        encoder.add(*record)
    data, found, most = encoder.take(), [], 0
    while data:
        (length, _), part = unpack_from(">II", data), decoder.feed(data[: 4 + unpack_from(">I", data)[0]])
        assert part and (length <= FULL_FRAME + 4 or len(part) == 1)
        data, most = data[4 + length :], max(most, len(part))
        found += part
    assert found == sent and 50 < most < 100


WELL = frame((frames.DATA, 1, b"well"))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pack(">II", 3, 0), id="shorter than its sequence"),
        pytest.param(pack(">II", MAX_FRAME + 5, 0), id="too long"),
        pytest.param(pack(">II", 2**32 - 1, 0), id="much too long"),
        pytest.param(frame((frames.DATA, 1, b""), sequence=1), id="a frame is missing"),
        pytest.param(WELL + WELL, id="a frame comes twice"),
        pytest.param(pack(">II", 4 + 8, 0) + bytes(8), id="a record without its size"),
        pytest.param(pack(">II", 4 + 9, 0) + pack(">BII", frames.DATA, 1, 1), id="a payload is cut"),
        pytest.param(
            pack(">II", 4 + 9, 0) + pack(">BII", frames.DATA, 1, 2**32 - 1), id="an endless payload"
        ),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="HTTP"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_no_frame_breaks_the_connection(data: bytes, whole: bool) -> None:
    """Also where it comes byte by byte, so that nobody waits for a frame that is too long."""
    decoder = FrameDecoder()
    with pytest.raises(BrokenFrames):
        for part in [data] if whole else [bytes([byte]) for byte in data]:
            decoder.feed(part)
            decoder.check()


@given(st.binary(max_size=300), st.integers(0, 60), st.integers(0, 255))
def test_a_changed_byte_is_a_record_or_breaks_and_never_more(rest: bytes, at: int, value: int) -> None:
    sent = bytearray(WELL + frame((frames.HEAD, 2, b"x" * 20), sequence=1))
    sent[at % len(sent)] = value
    data, decoder, bytewise = bytes(sent) + rest, FrameDecoder(), FrameDecoder()
    records = decoder.feed(data)
    assert sum(9 + len(payload) for _, _, payload in records) <= len(data)
    # However it is cut, the same comes before what breaks it.
    assert [record for byte in data for record in bytewise.feed(bytes([byte]))] == records
    assert str(bytewise.broken) == str(decoder.broken)


@pytest.mark.parametrize("most", [1, 2, MAX_FRAME])
def test_the_records_before_what_is_no_frame_come_first(most: int) -> None:
    answer = [(frames.HEAD, 1, b"\x00\xc8"), (frames.END, 1, b"all of it")]
    decoder, found = FrameDecoder(), list[Record]()
    data = frame(*answer) + pack(">II", 3, 1)
    while part := decoder.feed(data, most):
        found, data = found + part, b""
    assert found == answer
    with pytest.raises(BrokenFrames, match="a frame of 3 bytes"):
        decoder.check()
    assert decoder.feed(frame((frames.DATA, 2, b""), sequence=1)) == []


def test_heads_have_status_and_headers() -> None:
    sent = frames.head(503, [(b"Retry-After", b"3"), (b"x", b"a: b"), (b"x", b"")])
    assert frames.head_of(sent) == (503, {b"retry-after": b"3", b"x": b""})
    assert frames.head_of(frames.head(200, [])) == (200, {})
    assert frames.credit_of(frames.credit(2**32 - 1)) == 2**32 - 1


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x00\xc8no colon\r\n"])
def test_what_is_no_head_breaks_the_connection(payload: bytes) -> None:
    with pytest.raises(BrokenFrames):
        frames.head_of(payload)


@pytest.mark.parametrize("payload", [b"", b"\x00\x00\x01", bytes(5)])
def test_what_is_no_window_breaks_the_connection(payload: bytes) -> None:
    with pytest.raises(BrokenFrames):
        frames.credit_of(payload)
