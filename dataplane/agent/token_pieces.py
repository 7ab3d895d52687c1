"""The text that a token adds to a text, for vocabularies in which this does not depend on the tokens before it.

A decoder that goes from token to token, and changes at most the beginning of a text, writes the same characters for a
token behind any other that stands for whole characters. They are looked up once for each token then, which costs less
than to decode the end of a text with and without it.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

_REPLACEMENT = "\ufffd"
_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def token_piece_reader(tokenizer: Any) -> Callable[[int], str | None]:
    """A function from a token id to its piece, by a `tokenizers.Tokenizer`: what its decoder, which leaves out special
    tokens, adds for the token behind another that has a piece. None for tokens that are bytes of a character, and for
    those that have no text; for all tokens where the decoder is none that is known to write each token by itself.
    """
    anchor = _anchor(tokenizer)
    if anchor is None:
        return _no_piece
    before = str(tokenizer.decode([anchor]))

    @cache
    def piece(token_id: int) -> str | None:
        if _FALLBACK.fullmatch(tokenizer.id_to_token(token_id) or ""):
            return None
        text = str(tokenizer.decode([anchor, token_id]))
        added = text[len(before) :]
        return added if added and text.startswith(before) and _REPLACEMENT not in added else None

    return piece


def _no_piece(_token_id: int) -> str | None:
    return None


def _anchor(tokenizer: Any) -> int | None:
    """A token of whole characters, behind which others are decoded; None where a table cannot tell their text."""
    if tokenizer.decoder is None or not _writes_each_token(json.loads(tokenizer.decoder.__getstate__())):
        return None
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = str(tokenizer.decode([token_id]))
        if (
            text.strip().isascii()
            and text.strip().isalnum()
            and not _FALLBACK.fullmatch(tokenizer.id_to_token(token_id))
        ):
            return token_id
    return None


def _writes_each_token(decoder: dict[str, Any]) -> bool:
    """Whether a decoder changes no text across tokens, but for one character at the beginning of all."""
    match decoder:
        case {"type": "Sequence", "decoders": parts}:
            return all(map(_writes_each_token, parts))
        case {"type": "Replace", "pattern": {"String": pattern}}:
            return len(pattern) == 1
        case {"type": "Strip", "start": start, "stop": stop}:
            return bool(start <= 1 and stop == 0)
        case {"type": kind}:
            return kind in {"ByteLevel", "ByteFallback", "Fuse", "Metaspace"}
    return False
