"""Tokenizers: a checkpoint's, and the word list of replayed models.

The `tokenizers` library is used directly: transformers' AutoTokenizer imports torch, which an agent never does.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Protocol
from weakref import WeakValueDictionary
from zlib import crc32

from dataplane.agent.templates.chat_template import ChatTemplate
from dataplane.agent.token_bounds import TokenBound
from dataplane.agent.token_bytes import token_bytes_reader
from dataplane.agent.token_pieces import token_piece_reader
from dataplane.engines.replay.vocabulary import WORDS
from dataplane.protocol.errors import BadRequestError, ContextLengthError, DataplaneError, ModelLoadError
from dataplane.protocol.messages import EngineKind

_WORD_IDS = {word: token_id for token_id, word in enumerate(WORDS)}


class Tokenizer(Protocol):
    """The tokenizer of a model, and its chat template: None where it has none."""

    template: ChatTemplate | None
    added_tokens: Mapping[str, int]
    """The ids of tokens that are not made of others, by their text: special tokens and markers."""

    def encode_text(
        self, prompt: str, *, tokens_max: int, special: bool = True, param: str = "prompt"
    ) -> tuple[int, ...]:
        """The tokens of a text. `special`: with the tokens that the checkpoint adds around a plain prompt, and that a
        chat template writes itself.

        Raises:
            ContextLengthError: it has more than `tokens_max` tokens; the error names `param`.
        """

    def encode_pair(self, query: str, document: str, *, tokens_max: int) -> tuple[int, ...]:
        """The tokens of two texts, as the checkpoint joins them; raises as `encode_text` does, naming `messages`."""

    def special_id(self, token: str) -> int | None:
        """The id of a special token, which `decode` leaves out; None where this text is none."""

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary spells it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; special tokens are left out."""

    def piece(self, token_id: int) -> str | None:
        """What a token adds to the text that `decode` makes of another token with a piece; None for tokens whose text
        depends on their neighbours: parts of characters, and special tokens. It costs less than `decode`.
        """

    def whole_text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, with special tokens."""

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
            self.template = ChatTemplate.of_folder(Path(folder))
        except ModelLoadError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelLoadError(f"{folder}: the tokenizer cannot be used: {error}", param="path") from error
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.added_tokens: Mapping[str, int] = {token.content: token_id for token_id, token in added}
        self._special = {token.content: token_id for token_id, token in added if token.special}
        self._vocabulary_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._bound = TokenBound.of_file(path)
        self._token_bytes = token_bytes_reader(self._tokenizer)
        self.piece = token_piece_reader(self._tokenizer)

    def encode_text(
        self, prompt: str, *, tokens_max: int, special: bool = True, param: str = "prompt"
    ) -> tuple[int, ...]:
        """The tokens of a text. `encode_batch_fast` releases the interpreter lock; `encode` may hold it for seconds."""
        if self._bound is not None and len(prompt) > tokens_max:
            _check_length(self._bound.least_tokens(prompt, enough=tokens_max), tokens_max, param)
        [encoding] = self._tokenizer.encode_batch_fast([prompt], add_special_tokens=special)
        _check_length(len(encoding), tokens_max, param)
        return tuple(encoding.ids)

    def encode_pair(self, query: str, document: str, *, tokens_max: int) -> tuple[int, ...]:
        """The tokens of two texts, joined by the template of the tokenizer, or else one after the other."""
        for text in (query, document):
            if self._bound is not None and len(text) > tokens_max:
                _check_length(self._bound.least_tokens(text, enough=tokens_max), tokens_max, "messages")
        [encoding] = self._tokenizer.encode_batch_fast([(query, document)], add_special_tokens=True)
        _check_length(len(encoding), tokens_max, "messages")
        return tuple(encoding.ids)

    def special_id(self, token: str) -> int | None:
        return self._special.get(token)

    def token_text(self, token_id: int) -> str:
        return str(self._tokenizer.id_to_token(token_id) or "")

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def whole_text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        return self._token_bytes(token_id)

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        _check_range(token_ids, self._vocabulary_size, param)


class WordTokenizer:
    """The tokenizer of a replayed model without files: one token a word; an unknown word becomes a known one."""

    template: ChatTemplate | None = None
    added_tokens: Mapping[str, int] = MappingProxyType({})

    def encode_text(
        self, prompt: str, *, tokens_max: int, special: bool = True, param: str = "prompt"
    ) -> tuple[int, ...]:
        words = (found[0] for found in islice(re.finditer(r"\S+", prompt), tokens_max + 1))
        token_ids = tuple(_WORD_IDS.get(word, crc32(word.encode()) % len(WORDS)) for word in words)
        _check_length(len(token_ids), tokens_max, param)
        return token_ids

    def encode_pair(self, query: str, document: str, *, tokens_max: int) -> tuple[int, ...]:
        return self.encode_text(f"{query} {document}", tokens_max=tokens_max, param="messages")

    def special_id(self, token: str) -> int | None:
        return None

    def token_text(self, token_id: int) -> str:
        return WORDS[token_id % len(WORDS)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)

    def piece(self, token_id: int) -> str | None:
        return f" {WORDS[token_id % len(WORDS)]}"

    def whole_text(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return f" {WORDS[token_id % len(WORDS)]}".encode()

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        _check_range(token_ids, len(WORDS), param)


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
    """The tokenizers in use on a node, by the path of their model. `load` is called in a thread; `compile_template`
    gives the variables of a chat template.
    """

    def __init__(
        self, engine: EngineKind, load: LoadTokenizer, compile_template: Callable[[str], Awaitable[frozenset[str]]]
    ) -> None:
        self._engine = engine
        self._compile_template = compile_template
        self._load = load
        self._loaded: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()

    async def get(self, path: str, folder: str) -> Tokenizer:
        """The tokenizer of a model whose checkpoint is in a folder.

        Raises:
            ModelLoadError: it is missing or cannot be used, or its chat template is none.
        """
        if (loaded := self._loaded.get(path)) is not None:
            return loaded
        tokenizer = await asyncio.to_thread(self._load, folder, self._engine)
        if tokenizer.template is not None:
            await self._compile(tokenizer.template, folder)
        return self._loaded.setdefault(path, tokenizer)

    async def _compile(self, template: ChatTemplate, folder: str) -> None:
        try:
            found = [await self._compile_template(source) for source in template.sources]
        except DataplaneError as error:
            raise ModelLoadError(f"{folder}: {error.message}", param="path") from error
        template.variables = frozenset().union(*found)


def _check_length(tokens: int, tokens_max: int, param: str) -> None:
    if tokens > tokens_max:
        raise ContextLengthError(
            f"the prompt has at least {tokens} tokens; the model takes at most {tokens_max} here", param=param
        )


def _check_range(token_ids: Sequence[int], vocabulary_size: int, param: str) -> None:
    outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocabulary_size), None)
    if outside is not None:
        raise BadRequestError(f"token {outside} is not in the vocabulary (0 to {vocabulary_size - 1})", param=param)
