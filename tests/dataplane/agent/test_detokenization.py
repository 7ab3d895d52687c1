"""Tokens to text as they come: whole characters, right blanks, stop strings over token borders, markers."""

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from dataplane.agent.detokenization import IncrementalDetokenizer
from dataplane.agent.tokenization import CheckpointTokenizer, WordTokenizer
from dataplane.engines.replay.vocabulary import WORDS


class ByteTokenizer(WordTokenizer):
    """One token a byte: every multi-byte character is split over tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    def piece(self, token_id: int) -> str | None:
        return chr(token_id) if token_id < 128 else None


class Marked(ByteTokenizer):
    """Tokens above those of bytes are special: its text leaves them out."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode([token_id for token_id in token_ids if token_id < 256])


def stream(data: bytes, *stop: str, min_tokens: int = 0) -> tuple[list[str], IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), stop, min_tokens=min_tokens)
    pieces = []
    for token_id in data:
        pieces.append(detokenizer.feed(token_id))
        if detokenizer.stopped:
            return pieces, detokenizer
    return [*pieces, detokenizer.finish()], detokenizer


def test_characters_are_never_broken() -> None:
    pieces, _ = stream("aé€😀b".encode())
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "b"]


@given(st.text(max_size=30))
def test_the_pieces_make_the_whole(text: str) -> None:
    pieces, _ = stream(text.encode())
    assert "".join(pieces) == text


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_come_out_too(data: bytes) -> None:
    pieces, _ = stream(data)
    assert all(isinstance(piece, str) for piece in pieces)
    kept = [c for c in data.decode("utf-8", errors="ignore") if c.isascii()]
    assert [c for c in "".join(pieces) if c.isascii()] == kept


def test_bytes_that_never_make_a_character_are_not_held_for_ever() -> None:
    pieces, _ = stream(b"\xf0" * 40)
    assert any(pieces[:-1])


def test_a_stop_string_over_many_tokens_is_held_back_and_cut() -> None:
    pieces, detokenizer = stream(b"one END two", "END")
    assert "".join(pieces) == "one "
    assert detokenizer.stopped
    assert detokenizer.feed(ord("x")) == ""
    assert detokenizer.finish() == ""


def test_a_false_start_of_a_stop_string_is_released() -> None:
    pieces, detokenizer = stream(b"EN-ENE", "END")
    assert pieces == ["", "", "EN-", "", "", "EN", "E"]
    assert not detokenizer.stopped


@pytest.mark.parametrize(
    ("data", "stop", "expected"),
    [
        ("aab", ("ab",), "a"),
        ("abc", ("c", "bc"), "a"),  # the stop that begins first wins
        ("aaab", ("aab",), "a"),
        ("stop", ("stop",), ""),
        ("x😀y", ("😀",), "x"),
        ("nothing", ("else",), "nothing"),
    ],
)
def test_stops(data: str, stop: tuple[str, ...], expected: str) -> None:
    pieces, detokenizer = stream(data.encode(), *stop)
    assert "".join(pieces) == expected
    assert detokenizer.stopped == (data != expected)


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "a"), (4, "a"), (5, "aSTOPb"), (9, "aSTOPb"), (10, "aSTOPbSTOPc"), (99, None)]
)
def test_a_stop_string_within_the_first_tokens_is_text(min_tokens: int, expected: str | None) -> None:
    text = "aSTOPbSTOPc"
    pieces, detokenizer = stream(f"{text}STOPd".encode(), "STOP", min_tokens=min_tokens)
    assert "".join(pieces) == (expected or f"{text}STOPd")
    assert detokenizer.stopped == (expected is not None)


def test_tokens_without_text_are_among_the_first() -> None:
    detokenizer = IncrementalDetokenizer(Marked(), ["STOP"], min_tokens=6)
    for token_id in (302, 302, *b"STOP"):
        detokenizer.feed(token_id)
    assert not detokenizer.stopped
    for token_id in b"STOP":
        detokenizer.feed(token_id)
    assert detokenizer.stopped


@given(
    st.text(alphabet="ab", max_size=20),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 20),
)
def test_stop_is_where_a_search_of_the_whole_text_ends(text: str, stop: list[str], min_tokens: int) -> None:
    """The text ends before the stop string that is complete first, behind the first tokens; of several, before the one
    that begins first.
    """
    found = [(at + len(s), at) for s in stop for at in range(len(text)) if text.startswith(s, at)]
    ends = sorted((end, begin) for end, begin in found if end > min_tokens)
    pieces, detokenizer = stream(text.encode(), *stop, min_tokens=min_tokens)
    assert "".join(pieces) == (text[: ends[0][1]] if ends else text)
    assert detokenizer.stopped == bool(ends)


def test_words_have_blanks_between_them_and_none_in_front() -> None:
    detokenizer = IncrementalDetokenizer(WordTokenizer())
    ids = [WORDS.index(word) for word in ("the", "tide", "turns")]
    assert [detokenizer.feed(token_id) for token_id in ids] == ["the", " tide", " turns"]
    assert detokenizer.finish() == ""


def test_special_tokens_that_are_shown_stand_where_they_were() -> None:
    text = IncrementalDetokenizer(Marked(), ["[STOP]"], shown={300: "[CALL]", 301: "[STOP]"})
    tokens = [*"né".encode()[:2], 300, *"é!".encode(), 302, 301, 65]
    assert [text.feed(token_id) for token_id in tokens] == ["n", "", "\ufffd[CALL]", "", "é", "!", "", "", ""]
    assert text.stopped


class CountingTokenizer(CheckpointTokenizer):
    """Counts the most tokens that it decoded at once."""

    longest = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> CountingTokenizer:
    """A byte-level tokenizer of single bytes, with two special tokens."""
    folder = tmp_path_factory.mktemp("bytewise")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|pad|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return CountingTokenizer(folder)


@given(st.text(max_size=12), st.lists(st.tuples(st.integers(0, 50), st.sampled_from([256, 257, 999])), max_size=40))
def test_tokens_that_are_left_out_change_no_text(
    bytewise: CountingTokenizer, text: str, left_out: list[tuple[int, int]]
) -> None:
    token_ids = list(bytewise.encode_text(text, tokens_max=100))
    for at, token_id in left_out:
        token_ids.insert(min(at, len(token_ids)), token_id)
    detokenizer = IncrementalDetokenizer(bytewise)
    pieces = [detokenizer.feed(token_id) for token_id in token_ids]
    assert "".join([*pieces, detokenizer.finish()]) == bytewise.decode(token_ids) == text


def test_tokens_that_are_left_out_do_not_make_the_decoded_window_longer(bytewise: CountingTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(bytewise)
    bytewise.longest = 0
    shown = [detokenizer.feed(token_id) for token_id in bytewise.encode_text("né", tokens_max=9)]
    assert [detokenizer.feed(token_id) for token_id in [256, 257, 999] * 100] == [""] * 300
    assert [*shown, *(detokenizer.feed(token_id) for token_id in bytewise.encode_text("€!", tokens_max=9))] == [
        *("n", "", "é"),
        *("", "", "€", "!"),
    ]
    assert bytewise.longest <= 6
