"""Logs without secrets."""

import io

import pytest

from dataplane.runtime.masked import MaskedStream, mask

SECRET = "tp-client-Xy3q6rT0c1n2m3b4v5c6x7z8a9s0d1f2g3h4j5k6l7q8"


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"Authorization: Bearer {SECRET}",
        f"{{'authorization': 'Bearer {SECRET}'}}",
        f"authorization=bearer {SECRET.removeprefix('tp-client-')}",
        f"(b'authorization', b'Bearer {SECRET}')",
        f"redis://:{SECRET}@localhost:6379/0",
        f"postgresql+psycopg://me:{SECRET}@db/tidepool is away",
    ],
)
def test_secrets_are_masked(text: str) -> None:
    masked = mask(text)
    assert "***" in masked
    assert SECRET.removeprefix("tp-client-")[:6] not in masked


def test_other_words_stay() -> None:
    for text in ("the bearer", "tp-client-Xy3q", "http://127.0.0.1:8080/v1", "a tp-a-b c", "3 tokens per second", ""):
        assert mask(text) == text


def test_a_stream_forwards_all_else() -> None:
    kept = io.StringIO()
    stream = MaskedStream(kept)
    assert stream.write(f"a {SECRET}\n") == len(SECRET) + 3
    stream.flush()
    assert kept.getvalue() == "a tp-client-***\n"
    assert not stream.isatty()
