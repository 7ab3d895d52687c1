"""Streams of records."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.protocol.messages import Finished, Started, Token
from dataplane.protocol.records import PAYLOAD_BYTES_MAX, RecordReader, TextRecord, encode_events, encode_text, joined

EVENTS = (
    Started(prompt_tokens=3),
    Token(text="a\n\u2028", token_ids=(1, 2**32 - 1)),
    Finished(finish_reason="stop", prompt_tokens=3, completion_tokens=2),
)
TEXTS = st.builds(
    TextRecord,
    st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=40),
)


@given(st.lists(TEXTS | st.sampled_from(EVENTS), max_size=8), st.data())
def test_records_are_read_as_written_however_they_arrive(records: list, data: st.DataObject) -> None:
    stream = b"".join(
        encode_text(one.token_ids, one.chars, one.payload) if isinstance(one, TextRecord) else encode_events([one])
        for one in records
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    reader, found = RecordReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == records


def test_several_events_are_one_record() -> None:
    assert RecordReader().feed(encode_events(EVENTS)) == list(EVENTS)


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 500 Oh!",
        (PAYLOAD_BYTES_MAX + 1).to_bytes(4, "little") + bytes(8),
        encode_events(EVENTS).replace(b"started", b"stopped"),
    ],
)
def test_other_bytes_are_refused(stream: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        RecordReader().feed(stream)


def test_text_records_are_one_if_nothing_else_is_among_them() -> None:
    first, second = TextRecord((1,), 2, b"ab"), TextRecord((2, 3), 1, b"c")
    assert joined([first]) == first
    assert joined([first, second]) == TextRecord((1, 2, 3), 3, b"abc")
    assert joined([first, EVENTS[0], second]) is None
    assert joined([]) is None


def test_a_record_of_many_pieces_is_read_once_it_is_whole() -> None:
    """And so are the records behind it."""
    large = TextRecord((1,), 1, b"x" * 1_000_000)
    small = TextRecord((2,), 1, b"y")
    stream = b"".join(encode_text(one.token_ids, one.chars, one.payload) for one in (small, large, small))
    reader, found = RecordReader(), []
    for start in range(0, len(stream), 7):
        found += reader.feed(stream[start : start + 7])
    assert found == [small, large, small]
