"""Tokenizers: a checkpoint's, and the word list of replayed models; and the incremental detokenization of an answer.

The `tokenizers` library is used directly: transformers' AutoTokenizer imports torch, which an agent never does.
"""

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary
from zlib import crc32

from dataplane.agent.token_bounds import TokenBound
from dataplane.agent.token_bytes import token_bytes_reader
from dataplane.engines.replay.vocabulary import WORDS
from dataplane.protocol.errors import BadRequestError, ContextLengthError, ModelLoadError
from dataplane.protocol.messages import ChatMessage, EngineKind

REPLACEMENT = "\ufffd"
"""What a decoder writes where bytes of a character are missing."""

HELD_TOKENS_MAX = 8
"""Tokens held back for the missing bytes of a character, which has 4 bytes at most."""

_WORD_IDS = {word: token_id for token_id, word in enumerate(WORDS)}


class Tokenizer(Protocol):
    """The tokenizer of a model."""

    def encode_chat(self, messages: Sequence[ChatMessage], *, tokens_max: int) -> tuple[int, ...]:
        """The prompt of a conversation, up to the beginning of the answer.

        Raises:
            ContextLengthError: it has more than `tokens_max` tokens.
        """

    def encode_text(self, prompt: str, *, tokens_max: int) -> tuple[int, ...]:
        """The tokens of a plain prompt; raises as `encode_chat` does."""

    def encode_pair(self, query: str, document: str, *, tokens_max: int) -> tuple[int, ...]:
        """The tokens of two texts, as the checkpoint joins them; raises as `encode_chat` does."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; special tokens are left out."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for: a text, with the blank that separates it from the one before, or some bytes of a
        character. Special tokens have their names; ids without a token have none.
        """

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids that the model does not have.

        Raises:
            BadRequestError: an id is negative or beyond the vocabulary; it names `param`.
        """


class CheckpointTokenizer:
    """The tokenizer of a checkpoint folder: `tokenizer.json`, and its chat template."""

    def __init__(self, folder: Path | str) -> None:
        """Read the folder.

        Raises:
            ModelLoadError: `tokenizer.json` is missing or cannot be used.
        """
        # One prompt at a time gains nothing from the library's own threads.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers  # noqa: PLC0415  (it belongs to an extra)

        path = Path(folder) / "tokenizer.json"
        try:
            if not path.is_file():
                raise ModelLoadError(f"{path} is missing", param="path")
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            self._config = _read_json(Path(folder) / "tokenizer_config.json")
            self._template = _chat_template(Path(folder), self._config)
        except ModelLoadError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelLoadError(f"{folder}: the tokenizer cannot be used: {error}", param="path") from error
        self._vocabulary_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._bound = TokenBound.of_file(path)
        self._token_bytes = token_bytes_reader(self._tokenizer)

    def encode_chat(self, messages: Sequence[ChatMessage], *, tokens_max: int) -> tuple[int, ...]:
        """Render the chat template, or `role: content` lines where the checkpoint has none.

        Raises:
            BadRequestError: the template refuses these messages.
            ContextLengthError: they have more than `tokens_max` tokens.
        """
        if self._template is None:
            return self._encode(_plain_chat(messages), "messages", tokens_max, special=True)
        try:
            rendered = self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                bos_token=_token_text(self._config.get("bos_token")),
                eos_token=_token_text(self._config.get("eos_token")),
            )
        except Exception as error:  # whatever the template does
            raise BadRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return self._encode(rendered, "messages", tokens_max, special=False)

    def encode_text(self, prompt: str, *, tokens_max: int) -> tuple[int, ...]:
        """The tokens of a plain prompt, special tokens added as the checkpoint wants them."""
        return self._encode(prompt, "prompt", tokens_max, special=True)

    def encode_pair(self, query: str, document: str, *, tokens_max: int) -> tuple[int, ...]:
        """The tokens of two texts, joined by the template of the tokenizer, or else one after the other."""
        for text in (query, document):
            if self._bound is not None and len(text) > tokens_max:
                _check_length(self._bound.least_tokens(text, enough=tokens_max), tokens_max, "messages")
        [encoding] = self._tokenizer.encode_batch_fast([(query, document)], add_special_tokens=True)
        _check_length(len(encoding), tokens_max, "messages")
        return tuple(encoding.ids)

    def _encode(self, text: str, param: str, tokens_max: int, *, special: bool) -> tuple[int, ...]:
        """The tokens of a text. `encode_batch_fast` releases the interpreter lock; `encode` may hold it for seconds."""
        if self._bound is not None and len(text) > tokens_max:
            _check_length(self._bound.least_tokens(text, enough=tokens_max), tokens_max, param)
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        _check_length(len(encoding), tokens_max, param)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        return self._token_bytes(token_id)

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        _check_range(token_ids, self._vocabulary_size, param)


class WordTokenizer:
    """The tokenizer of a replayed model without files: one token a word; an unknown word becomes a known one."""

    def encode_chat(self, messages: Sequence[ChatMessage], *, tokens_max: int) -> tuple[int, ...]:
        return _word_ids(_plain_chat(messages), "messages", tokens_max)

    def encode_text(self, prompt: str, *, tokens_max: int) -> tuple[int, ...]:
        return _word_ids(prompt, "prompt", tokens_max)

    def encode_pair(self, query: str, document: str, *, tokens_max: int) -> tuple[int, ...]:
        return _word_ids(f"{query} {document}", "messages", tokens_max)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return f" {WORDS[token_id % len(WORDS)]}".encode()

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        _check_range(token_ids, len(WORDS), param)


def _word_ids(text: str, param: str, tokens_max: int) -> tuple[int, ...]:
    words = (found[0] for found in islice(re.finditer(r"\S+", text), tokens_max + 1))
    token_ids = tuple(_WORD_IDS.get(word, crc32(word.encode()) % len(WORDS)) for word in words)
    _check_length(len(token_ids), tokens_max, param)
    return token_ids


def load_tokenizer(path: str, engine: EngineKind) -> Tokenizer:
    """The tokenizer of a checkpoint folder; of a replayed model without `tokenizer.json`, words.

    Raises:
        ModelLoadError: the checkpoint's tokenizer is missing or cannot be used.
    """
    if engine == "replay" and not (Path(path) / "tokenizer.json").is_file():
        return WordTokenizer()
    return CheckpointTokenizer(path)


LoadTokenizer = Callable[[str, EngineKind], Tokenizer]


class TokenizerCache:
    """The tokenizers in use on a node, by the path of their model. `load` is called in a thread."""

    def __init__(self, engine: EngineKind, load: LoadTokenizer) -> None:
        self._engine = engine
        self._load = load
        self._loaded: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()

    async def get(self, path: str, folder: str) -> Tokenizer:
        """The tokenizer of a model whose checkpoint is in a folder.

        Raises:
            ModelLoadError: it is missing or cannot be used.
        """
        if (loaded := self._loaded.get(path)) is not None:
            return loaded
        return self._loaded.setdefault(path, await asyncio.to_thread(self._load, folder, self._engine))


class IncrementalDetokenizer:
    """Turns the tokens of one answer into text, and ends it at a stop string.

    `stopped` is set when a stop string was found; the text then ends before it and later tokens are ignored. Text is
    held back while the bytes of a character are incomplete, or while it may be the beginning of a stop string. The
    first `sent_chars` characters are left out: another instance has streamed them.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, sent_chars: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._sent_chars = sent_chars
        self._token_ids: list[int] = []
        #      start        read             end
        #  ids   |-- context --|-- not decoded --|
        self._start = 0
        self._read = 0
        self._held = ""
        self.stopped = False

    def resume(self, token_ids: Sequence[int]) -> str:
        """Add the tokens of another instance; their text that was not sent yet."""
        return "".join([self.feed(token_id) for token_id in token_ids])

    def feed(self, token_id: int) -> str:
        """Add a token; the text that is certain with it."""
        if self.stopped:
            return ""
        self._token_ids.append(token_id)
        before, after = self._decode_window()
        incomplete = after.endswith(REPLACEMENT) and len(self._token_ids) - self._read < HELD_TOKENS_MAX
        if incomplete or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._token_ids)
        return self._release(after[len(before) :])

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._tokenizer.token_bytes(token_id)

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        if self.stopped:
            return ""
        before, after = self._decode_window()
        self._start = self._read = len(self._token_ids)
        return self._release(after[len(before) :], last=True)

    def _decode_window(self) -> tuple[str, str]:
        """Text of the context alone, and with the tokens after it: decoders place blanks by a token's neighbours."""
        return (
            self._tokenizer.decode(self._token_ids[self._start : self._read]),
            self._tokenizer.decode(self._token_ids[self._start :]),
        )

    def _release(self, new: str, *, last: bool = False) -> str:
        pending = self._held + new
        found = [at for at in (pending.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return self._unsent(pending[: min(found)])
        keep = 0 if last else max((_overlap(pending, stop) for stop in self._stop), default=0)
        self._held = pending[len(pending) - keep :]
        return self._unsent(pending[: len(pending) - keep])

    def _unsent(self, text: str) -> str:
        skipped = min(self._sent_chars, len(text))
        self._sent_chars -= skipped
        return text[skipped:]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _check_length(tokens: int, tokens_max: int, param: str) -> None:
    if tokens > tokens_max:
        raise ContextLengthError(
            f"the prompt has at least {tokens} tokens; the model takes at most {tokens_max} here", param=param
        )


def _check_range(token_ids: Sequence[int], vocabulary_size: int, param: str) -> None:
    outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocabulary_size), None)
    if outside is not None:
        raise BadRequestError(f"token {outside} is not in the vocabulary (0 to {vocabulary_size - 1})", param=param)


def _plain_chat(messages: Sequence[ChatMessage]) -> str:
    lines = [f"{message.role}: {message.content}" for message in messages]
    return "\n".join([*lines, "assistant:"])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _token_text(token: Any) -> str:
    """A special token of `tokenizer_config.json`: a text, or an object with its text in `content`."""
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return "" if token is None else str(token)


def _chat_template(folder: Path, config: dict[str, Any]) -> Any:
    """The compiled chat template, in a sandbox since the checkpoint's author wrote it; None without one."""
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not source:
        return None
    from jinja2.ext import loopcontrols  # noqa: PLC0415  (it belongs to an extra)
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment.from_string(source)


def _refuse(message: str) -> None:
    raise ValueError(message)
