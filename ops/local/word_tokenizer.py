"""A tokenizer with a token for each word that the replay engine writes, so that a node and its clients count alike."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from dataplane.engines.replay.vocabulary import WORDS

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_word_tokenizer(folder: Path) -> Path:
    """Write what nodes and clients load from a model's folder. Unknown words read as the first known one, and the chat
    template adds no token to what messages contain.
    """
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
