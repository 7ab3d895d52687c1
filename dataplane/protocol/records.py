"""Streams of records: what a node sends to a reader that passes text on unread.

A record is a head, token ids and a payload. Of most tokens the payload is finished bytes of a server-sent event, which
the reader copies to its client; it needs only the tokens, to continue the answer elsewhere, and how many characters of
text they are. All other events are lines of JSON, as in a stream of lines (`dataplane.protocol.messages`).

    offset  size        field
    0       u32         bytes of the payload
    4       u32         characters of text in the payload
    8       u16         token ids
    10      u16         kind of the payload: 0 lines of JSON events, 1 text
    12      u32 each    token ids
    ...                 payload

Numbers are little-endian.
"""

import struct
from collections.abc import Sequence

import msgspec

from dataplane.protocol.messages import StreamEvent, decode_lines, encode_line

MEDIA_TYPE = "application/vnd.tidepool.records"
"""Of a request's `accept` header, if the sender reads records, and of an answer that is a stream of them."""
PAYLOAD_BYTES_MAX = 16 << 20
_HEAD = struct.Struct("<IIHH")
_HEAD_OF_ONE = struct.Struct("<IIHHI")
_EVENTS, _TEXT = 0, 1


class TextRecord(msgspec.Struct, frozen=True, array_like=True):
    """New tokens whose text is `payload`, as the reader's client shall get it: the bytes of a server-sent event, or
    none where the tokens have no text yet. `chars`: characters of the text.
    """

    token_ids: tuple[int, ...]
    chars: int
    payload: bytes


RecordedEvent = TextRecord | StreamEvent
"""What a stream of records holds."""


def encode_text(token_ids: Sequence[int], chars: int, payload: bytes) -> bytes:
    """The bytes of a text record."""
    count = len(token_ids)
    if count == 1:
        return _HEAD_OF_ONE.pack(len(payload), chars, 1, _TEXT, token_ids[0]) + payload
    return struct.pack(f"<IIHH{count}I", len(payload), chars, count, _TEXT, *token_ids) + payload


def encode_events(events: Sequence[StreamEvent]) -> bytes:
    """The bytes of a record of events."""
    lines = b"".join(map(encode_line, events))
    return _HEAD.pack(len(lines), 0, 0, _EVENTS) + lines


class RecordReader:
    """Finds records in the pieces in which a stream arrives."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._missing_bytes = 0  # of the record that begins with the rest, at least

    def feed(self, data: bytes) -> list[RecordedEvent]:
        """The records and events that are whole with this piece, in order.

        Raises:
            msgspec.DecodeError: the bytes are no records of this protocol.
        """
        if self._rest:  # pieces of a large record are joined once
            self._rest.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                return []
            data = b"".join(self._rest)
        elif (only := _token_record(data)) is not None:
            return [only]
        missing = _HEAD.size
        found: list[RecordedEvent] = []
        start, end = 0, len(data)
        while end - start >= _HEAD.size:
            size, chars, count, kind = _HEAD.unpack_from(data, start)
            if kind > _TEXT or size > PAYLOAD_BYTES_MAX:
                raise msgspec.DecodeError(f"no record: kind {kind}, {size} bytes")
            payload = start + _HEAD.size + 4 * count
            if payload + size > end:
                missing = payload + size - start
                break
            if kind == _TEXT:
                token_ids = struct.unpack_from(f"<{count}I", data, start + _HEAD.size)
                found.append(TextRecord(token_ids, chars, data[payload : payload + size]))
            else:
                found += decode_lines(data[payload : payload + size])
            start = payload + size
        self._rest = [data[start:]] if start < end else []
        self._missing_bytes = missing - (end - start)
        return found


def _token_record(data: bytes) -> TextRecord | None:
    """The text record of one token, if that is all of `data`, as of most pieces in which a stream arrives."""
    if len(data) < _HEAD_OF_ONE.size:
        return None
    size, chars, count, kind, token_id = _HEAD_OF_ONE.unpack_from(data)
    if kind != _TEXT or count != 1 or len(data) != _HEAD_OF_ONE.size + size:
        return None
    return TextRecord((token_id,), chars, data[_HEAD_OF_ONE.size :])


def joined(records: Sequence[RecordedEvent]) -> TextRecord | None:
    """Text records as one; None if there are events among them."""
    if len(records) == 1:  # as most pieces of a stream are
        only = records[0]
        return only if isinstance(only, TextRecord) else None
    texts = [record for record in records if isinstance(record, TextRecord)]
    if not texts or len(texts) < len(records):
        return None
    return TextRecord(
        tuple(token_id for text in texts for token_id in text.token_ids),
        sum(text.chars for text in texts),
        b"".join([text.payload for text in texts]),
    )
