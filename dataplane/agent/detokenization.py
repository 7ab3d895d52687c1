"""The text of an answer, token by token: whole characters, and the end at a stop string."""

from collections.abc import Mapping, Sequence

from dataplane.agent.parsing.reasoning import overlap
from dataplane.agent.tokenization import Tokenizer

REPLACEMENT = "\ufffd"
"""What a decoder writes where bytes of a character are missing."""

HELD_TOKENS_MAX = 8
"""Tokens held back for the missing bytes of a character, which has 4 bytes at most."""


class IncrementalDetokenizer:
    """Turns the tokens of one answer into text, and ends it at a stop string.

    `stopped` is set when a stop string was found; the text then ends before it and later tokens are ignored. Text is
    held back while the bytes of a character are incomplete, or while it may be the beginning of a stop string.
    A stop string that is complete within the first `min_tokens` tokens is text. `shown`: the text of special tokens
    that are not left out, by their ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._not_yet = min_tokens
        """Tokens within which no stop string ends the text."""
        self._shown = shown or {}
        self._token_ids: list[int] = []
        #      start        read             end
        #  ids   |-- context --|-- not decoded --|
        self._start = 0
        self._read = 0
        self._held = ""
        self._settled = False
        """Whether nothing is undecoded, and the last token is one behind which others have their pieces."""
        self.stopped = False

    def feed(self, token_id: int) -> str:
        """Add a token; the text that is certain with it."""
        if self.stopped:
            return ""
        self._not_yet -= 1
        piece = self._tokenizer.piece(token_id)
        if piece is not None and self._settled:
            self._token_ids.append(token_id)
            self._start, self._read = self._read, len(self._token_ids)
            return self._release(piece) if self._stop else piece
        marker = self._shown.get(token_id)
        if marker is None and self._is_left_out(token_id):
            return ""
        self._settled = False
        if marker is not None:
            return self._mark(token_id, marker)
        self._token_ids.append(token_id)
        before, after = self._decode_window()
        incomplete = after.endswith(REPLACEMENT) and len(self._token_ids) - self._read < HELD_TOKENS_MAX
        if incomplete or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._token_ids)
        self._settled = piece is not None
        return self._release(after[len(before) :])

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._tokenizer.token_bytes(token_id)

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        if self.stopped:
            return ""
        before, after = ("", "") if self._settled else self._decode_window()
        self._start = self._read = len(self._token_ids)
        self._settled = False
        return self._release(after[len(before) :], last=True)

    def _is_left_out(self, token_id: int) -> bool:
        """Whether `decode` writes the same without this token: it is special, or the vocabulary does not have it."""
        text = self._tokenizer.token_text(token_id)
        return not text or self._tokenizer.special_id(text) == token_id

    def _mark(self, token_id: int, marker: str) -> str:
        """Add a special token that is shown: no character goes on behind it."""
        before, after = self._decode_window()
        self._token_ids.append(token_id)
        self._start, self._read = self._read, len(self._token_ids)
        return self._release(after[len(before) :] + marker)

    def _decode_window(self) -> tuple[str, str]:
        """Text of the context alone, and with the tokens after it: decoders place blanks by a token's neighbours."""
        return (
            self._tokenizer.decode(self._token_ids[self._start : self._read]),
            self._tokenizer.decode(self._token_ids[self._start :]),
        )

    def _release(self, new: str, *, last: bool = False) -> str:
        pending, held = self._held + new, len(self._held)
        wanted = self._stop if self._not_yet < 0 else ()
        # One that is complete without new text was so within the first tokens.
        found = [at for stop in wanted if (at := pending.find(stop, max(0, held - len(stop) + 1))) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return pending[: min(found)]
        keep = 0 if last else max((overlap(pending, stop) for stop in self._stop), default=0)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]
