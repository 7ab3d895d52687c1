"""The bytes that a single token stands for, as log probabilities report them.

A token of a byte-level vocabulary, or of byte fallback, may be part of a character: its bytes are told by its piece in
the vocabulary, while a decoder writes a replacement character. All bytes of an answer, joined, are its text.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

_CACHED_TOKENS = 2**16
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _letters() -> dict[str, int]:
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return {chr(byte if byte in plain else next(others)): byte for byte in range(256)}


BYTE_OF_LETTER = _letters()
"""The byte for each letter of byte-level vocabularies (GPT-2's): printable ones of Latin-1 stand for themselves, others
are written from U+0100 on, in order.
"""


def token_bytes_reader(tokenizer: Any) -> Callable[[int], bytes]:
    """A function from a token id to its bytes, by a `tokenizers.Tokenizer`; none for ids without a token. Blanks that a
    decoder places are those between two tokens; special tokens have their names' bytes.
    """
    decoder = tokenizer.decoder
    kinds = frozenset() if decoder is None else _kinds(json.loads(decoder.__getstate__()))
    added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    return lru_cache(_CACHED_TOKENS)(partial(_token_bytes, tokenizer, kinds, added))


def _token_bytes(tokenizer: Any, kinds: frozenset[str], added: dict[int, str], token_id: int) -> bytes:
    piece = added.get(token_id)
    if piece is not None:
        return piece.encode()
    piece = tokenizer.id_to_token(token_id)
    if piece is None:
        return b""
    if "ByteLevel" in kinds and all(char in BYTE_OF_LETTER for char in piece):
        return bytes(BYTE_OF_LETTER[char] for char in piece)
    if "ByteFallback" in kinds and (byte := _FALLBACK.fullmatch(piece)):
        return bytes.fromhex(byte[1])
    once, twice = (str(tokenizer.decode([token_id] * count)) for count in (1, 2))
    return twice[len(once) :].encode()


def _kinds(decoder: dict[str, Any]) -> frozenset[str]:
    """The types of a decoder and of those that it is a sequence of."""
    parts = (_kinds(part) for part in decoder.get("decoders", ()))
    return frozenset({decoder["type"]}).union(*parts)
