"""The tokens of a checkpoint as llguidance knows them: their bytes, which are added, and which end an answer."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dataplane.checkpoints.eos import read_eos_ids
from dataplane.checkpoints.safetensors_file import read_json
from dataplane.protocol.errors import BadRequestError

TOKENIZER_FILE = "tokenizer.json"


class TokenTable:
    """The tokens of a checkpoint folder. `added`: ids of added tokens by their text."""

    def __init__(self, folder: Path, *, size: int | None = None, eos_ids: Iterable[int] | None = None) -> None:
        """Read the folder, which takes up to a second.

        `size`: the model's vocabulary, of which ids that the tokenizer does not have are never allowed; None: the
        tokenizer's own. `eos_ids`: tokens that end an answer; None: as the folder says.

        Raises:
            BadRequestError: there is no `tokenizer.json`, it is of a kind whose tokens have no bytes of their own, or
                no token ends an answer.
        """
        # One text at a time gains nothing from the library's own threads.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import llguidance  # noqa: PLC0415  (it belongs to an extra)
        import tokenizers  # noqa: PLC0415  (it belongs to an extra)

        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise BadRequestError("a model without tokenizer.json follows no constraint", param="constraint")
        if eos_ids is None:
            config = folder / "config.json"
            eos_ids = read_eos_ids(folder, read_json(config) if config.is_file() else {})
        self.eos_ids = frozenset(eos_ids)
        if not self.eos_ids:
            raise BadRequestError("a model without end-of-sequence token follows no constraint", param="constraint")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            self.added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
            ends = sorted(self.eos_ids)
            self.table: Any = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
        except Exception as error:  # both libraries raise bare Exception or ValueError
            raise BadRequestError(f"the model's tokenizer allows no constraint: {error}", param="constraint") from error

    @property
    def size(self) -> int:
        return int(self.table.vocab_size)
