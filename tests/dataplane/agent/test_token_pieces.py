"""Pieces of tokens: text made of them is the text that the decoder makes, for the decoders of all families."""

import functools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dataplane.agent.detokenization import IncrementalDetokenizer
from dataplane.agent.token_pieces import token_piece_reader
from dataplane.agent.tokenization import WordTokenizer

BLANK = "\u2581"
WORDS = ["a", "the", "tide", "é", "€", "😀", "日本", ".", ",", "n't", "-", "\n", "'s", "\ufffd", "do not"]
MARKERS = ["<tool_call>", "< odd >"]
SPECIALS = ["<s>", "</s>"]


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def byte_level() -> Tokenizer:
    """Bytes, words, and parts of characters, spelled by the letters of byte-level vocabularies."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [spell.pre_tokenize_str(blank + word)[0][0] for word in WORDS for blank in ("", " ")]
    parts = [word[:-1] for word in words if len(word) > 1]
    pieces = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words, *parts])
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer)


def sentencepiece(decoder: decoders.Decoder, *, blank: str = BLANK) -> Tokenizer:
    """Words with and without a blank before them, single blanks, and bytes."""
    words = [before + word for word in WORDS for before in ("", blank)]
    pieces = dict.fromkeys([*(f"<0x{byte:02X}>" for byte in range(256)), blank, blank * 2, *words])
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoder
    return with_added(tokenizer)


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS)]
    tokenizer = Tokenizer(models.WordPiece(vocab={piece: number for number, piece in enumerate(pieces)}))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return with_added(tokenizer)


def suffixed() -> Tokenizer:
    return sentencepiece(decoders.BPEDecoder(suffix="</w>"), blank="")


def bare() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocab={word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    return with_added(tokenizer)


REPLACED = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
FAMILIES: dict[str, tuple[Callable[[], Tokenizer], bool]] = {
    "byte level": (byte_level, True),
    "llama 2": (lambda: sentencepiece(decoders.Sequence([*REPLACED, decoders.Strip(" ", 1, 0)])), True),
    "gemma": (lambda: sentencepiece(decoders.Sequence(REPLACED)), True),
    "t5": (lambda: sentencepiece(decoders.Metaspace()), True),
    "strips two": (lambda: sentencepiece(decoders.Sequence([*REPLACED, decoders.Strip(" ", 2, 0)])), False),
    "replaces a text": (
        lambda: sentencepiece(decoders.Sequence([*REPLACED, decoders.Replace("do not", "don't")])),
        False,
    ),
    "word piece": (word_piece, False),
    "suffixes": (suffixed, False),
    "no decoder": (bare, False),
}


@functools.cache
def family(name: str) -> Tokenizer:
    return FAMILIES[name][0]()


class Decoding(WordTokenizer):
    """A tokenizer of the library, with pieces or without."""

    def __init__(self, tokenizer: Tokenizer, *, pieces: bool) -> None:
        self._tokenizer = tokenizer
        self.piece = token_piece_reader(tokenizer) if pieces else lambda _: None  # type: ignore[method-assign]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))


def streamed(tokenizer: Decoding, token_ids: Sequence[int], stop: Sequence[str], shown: dict[int, str]) -> list[str]:
    text = IncrementalDetokenizer(tokenizer, stop, shown=shown)
    return [*(text.feed(token_id) for token_id in token_ids), text.finish(), str(text.stopped)]


@pytest.mark.parametrize("name", FAMILIES)
@given(
    seed=st.integers(0, 2**32), stop=st.lists(st.sampled_from(["tide", ". ", "é", "a"]), max_size=2), show=st.booleans()
)
def test_text_of_pieces_is_what_the_decoder_makes(name: str, seed: int, stop: list[str], show: bool) -> None:
    tokenizer, chance = family(name), random.Random(seed)
    size = tokenizer.get_vocab_size()
    ends = [tokenizer.token_to_id(word) for word in (*MARKERS, *SPECIALS)]
    some = chance.sample(range(size), 6)  # so that the same tokens meet often
    token_ids = [chance.choice([chance.randrange(size), chance.choice(some), chance.choice(ends)]) for _ in range(30)]
    token_ids.append(size + 5)  # none of the vocabulary
    shown = {tokenizer.token_to_id("<s>"): "<s>"} if show else {}
    ours, theirs = (streamed(Decoding(tokenizer, pieces=pieces), token_ids, stop, shown) for pieces in (True, False))
    assert ours == theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_are_known_where_a_token_is_written_by_itself(name: str) -> None:
    tokenizer, has_pieces = family(name), FAMILIES[name][1]
    piece = token_piece_reader(tokenizer)
    known = {token_id for token_id in range(tokenizer.get_vocab_size()) if piece(token_id) is not None}
    assert bool(known) == has_pieces
    assert not known & {tokenizer.token_to_id(special) for special in SPECIALS}
    if has_pieces:
        assert piece(tokenizer.token_to_id("tide")) == "tide"
        assert piece(tokenizer.token_to_id(MARKERS[0])) == MARKERS[0]
        assert piece(tokenizer.token_to_id("<0x41>" if name != "byte level" else "Ã")) is None
