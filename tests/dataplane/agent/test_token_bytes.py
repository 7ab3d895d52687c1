"""The bytes of single tokens, by the kinds of vocabularies there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dataplane.agent.token_bytes import token_bytes_reader


def byte_level() -> Tokenizer:
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["Ġt"] = 256
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens([AddedToken("é ", normalized=False)])
    return tokenizer


def with_byte_fallback() -> Tokenizer:
    """As Llama 2's: blanks are U+2581, unknown characters are bytes, and the first blank of a text is stripped."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁tide", "tide", "s"]
    tokenizer = Tokenizer(models.BPE(vocab={p: n for n, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    strip = decoders.Strip(" ", 1, 0)
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer


@given(st.text(max_size=20))
def test_the_bytes_of_byte_level_tokens_make_the_text(text: str) -> None:
    tokenizer = byte_level()
    read = token_bytes_reader(tokenizer)
    assert b"".join(read(token) for token in tokenizer.encode(text).ids).decode() == text


def test_every_byte_of_a_byte_level_vocabulary_and_added_tokens() -> None:
    tokenizer = byte_level()
    read = token_bytes_reader(tokenizer)
    assert sorted(read(token) for token in range(256)) == [bytes([byte]) for byte in range(256)]
    assert read(256) == b" t"
    assert read(tokenizer.token_to_id("<end>")) == b"<end>"
    assert read(tokenizer.token_to_id("é ")) == "é ".encode()
    assert read(9999) == b"", "a model's vocabulary may be padded"


@pytest.mark.parametrize(
    ("piece", "expected"),
    [("<0xE2>", b"\xe2"), ("▁tide", b" tide"), ("tide", b"tide"), ("s", b"s"), ("</s>", b"</s>"), ("▁", b" ")],
)
def test_pieces_of_a_vocabulary_with_byte_fallback(piece: str, expected: bytes) -> None:
    tokenizer = with_byte_fallback()
    assert token_bytes_reader(tokenizer)(tokenizer.token_to_id(piece)) == expected


def test_without_a_decoder_a_token_is_as_it_is_decoded() -> None:
    tokenizer = Tokenizer(models.WordLevel({"tide": 0, "ebb": 1}, unk_token="ebb"))
    assert token_bytes_reader(tokenizer)(0) == b" tide"
