"""A lower bound of the tokens of a text, without tokenizing it.

A byte of text costs 1 / (bytes of the longest token that contains it). The bytes of one token then cost at most 1, so
a text has at least as many tokens as its bytes cost. This holds only where every byte of the text is in some token:
tokenizers that may drop, shorten or merge their input have no bound.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from dataplane.agent.token_bytes import BYTE_OF_LETTER

_PIECE_BYTES = 16_384
"""Counted at once, while other threads wait."""

_COMPOSED_MAX = 4
"""NFC makes UTF-8 text at most so many times shorter; the worst case is 3.5, iota with two marks."""

_BLANK = "▁"
"""A blank in SentencePiece's vocabularies."""

_KEEPING = {"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}


class _Model(msgspec.Struct):
    type: str = ""
    vocab: Any = None
    byte_fallback: bool = False
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Added(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    truncation: Any = None


class TokenBound:
    """The bound of one tokenizer. `costs`: tokens of each byte value. `longest`: bytes of the longest token;
    `composes`: text is normalized to NFC first.
    """

    def __init__(self, costs: tuple[float, ...], *, longest: int, composes: bool) -> None:
        self._costs = costs
        self._longest = longest
        self._composes = composes

    @classmethod
    def of_file(cls, path: Path) -> Self | None:
        """The bound of a `tokenizer.json`; None for a tokenizer without one."""
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
        except msgspec.DecodeError:
            return None
        normalizers, pre_tokenizers = list(_parts(file.normalizer)), list(_parts(file.pre_tokenizer))
        byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
        known = all(map(_keeps_text, normalizers)) and all(map(_keeps_text, pre_tokenizers))
        model = file.model
        affixes = model.continuing_subword_prefix or model.end_of_word_suffix
        if not known or affixes or model.type != "BPE" or file.truncation is not None:
            return None
        if not _has_all_bytes(model, byte_level=byte_level):
            return None
        tokens = {_text_bytes(token, byte_level=byte_level) for token in model.vocab}
        tokens |= {bytes([byte]) for byte in range(256)}
        for added in file.added_tokens:
            tokens |= {(_BLANK + added.content.replace(" ", _BLANK)).encode(), added.content.encode()}
        costs = _costs(tokens)
        if any(added.lstrip or added.rstrip for added in file.added_tokens):
            costs = tuple(0.0 if byte in _BLANK_BYTES else cost for byte, cost in enumerate(costs))
        composes = any(part["type"] == "NFC" for part in normalizers)
        return cls(costs, longest=max(map(len, tokens)), composes=composes)

    def least_tokens(self, text: str, *, enough: int) -> int:
        """The bound of a text. Counting ends at `enough`, so that a long text takes no longer than a full context."""
        data = text.encode()
        if self._composes and not text.isascii():
            return len(data) // (_COMPOSED_MAX * self._longest)
        total = 0.0
        for start in range(0, len(data), _PIECE_BYTES):
            total += sum(map(self._costs.__getitem__, data[start : start + _PIECE_BYTES]))
            if total >= enough + 1:
                break
        return int(total)


def _parts(spec: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer, or the elements of a sequence of them."""
    if spec is None:
        return
    if spec["type"] != "Sequence":
        yield spec
        return
    for part in spec.get("normalizers") or spec.get("pretokenizers") or ():
        yield from _parts(part)


def _keeps_text(part: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer keeps all of the text, NFC apart."""
    match part["type"]:
        case "ByteLevel" | "Digits" | "Metaspace" | "Prepend" | "NFC":
            return bool(part.get("replacement", _BLANK) == _BLANK)
        case "Split" | "Punctuation":
            return part.get("behavior") in _KEEPING
        case "Replace":
            return bool(part.get("pattern") == {"String": " "} and part.get("content") == _BLANK)
    return False


def _has_all_bytes(model: _Model, *, byte_level: bool) -> bool:
    """Whether every byte is a token, so that no character is unknown."""
    if not isinstance(model.vocab, dict):
        return False
    if byte_level:
        return model.vocab.keys() >= BYTE_OF_LETTER.keys()
    return model.byte_fallback and model.vocab.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}


def _text_bytes(token: str, *, byte_level: bool) -> bytes:
    """The bytes of text that a token of the vocabulary stands for, or more."""
    if byte_level:
        with contextlib.suppress(KeyError):  # an added token is written as it is
            return bytes(map(BYTE_OF_LETTER.__getitem__, token))
    return token.encode()


def _costs(tokens: Iterable[bytes]) -> tuple[float, ...]:
    costs = [0.0] * 256
    missing = set(range(256))
    blank = set(_BLANK.encode())
    for token in sorted(tokens, key=len, reverse=True):
        if missing.isdisjoint(token):
            continue
        held = set(token)
        if blank <= held:
            held.add(ord(" "))
        for byte in held & missing:
            costs[byte] = 1 / len(token)
        missing -= held
    return tuple(costs)


_BLANK_BYTES = frozenset(
    byte for letter in map(chr, range(0x3001)) if letter.isspace() or letter == _BLANK for byte in letter.encode()
)
