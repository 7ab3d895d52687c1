"""`tokenizer.json` and `tokenizer_config.json` of a GGUF file.

transformers builds vocabulary, merges and added tokens. A file has the name of its pre-tokenizer; names that neither
transformers nor this module knows are refused, since another pre-tokenizer makes other tokens.
"""

from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from ops.gguf.header import GgufError, GgufHeader

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_DIGITS_APART = frozenset(("codeshell", "command-r", "refact", "smollm", "starcoder"))
"""Each digit is a word, then as GPT-2."""
_AS_GPT2 = frozenset(("default", "gpt-2"))
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(header: GgufHeader) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and its `tokenizer_config.json`.

    Raises:
        GgufError: the file has no tokenizer, or an unsupported one.
    """
    metadata = {key.removeprefix("tokenizer."): value for key, value in header.metadata.items()}
    tokens = metadata.get("ggml.tokens")
    if not isinstance(tokens, list) or len(tokens) != len(set(tokens)):
        raise GgufError(f"{header.path}: tokenizer.ggml.tokens must be a list of tokens, none of them twice")
    kind, split = metadata.get("ggml.model"), metadata.get("ggml.pre", "default")
    if kind not in {_BYTE_LEVEL, _SENTENCEPIECE}:
        raise GgufError(f"{header.path}: the tokenizer {kind!r} is not supported; supported are gpt2 and llama")
    if kind == _BYTE_LEVEL and split not in {*_DIGITS_APART, *_AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}:
        raise GgufError(f"{header.path}: tokenizer.ggml.pre = {split!r} is not supported")
    described = {name: metadata[key] for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items() if key in metadata}
    try:
        tokenizer, _ = convert_gguf_tokenizer(str(header.metadata["general.architecture"]), described)
    except Exception as error:  # tokenizers raises bare Exception
        raise GgufError(f"{header.path}: its tokenizer cannot be built: {error}") from error
    if kind == _BYTE_LEVEL and split in _DIGITS_APART:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    special = {name: _token(header, tokens, metadata.get(f"ggml.{key}_token_id")) for name, key in _SPECIAL.items()}
    begins = metadata.get("ggml.add_bos_token", kind == _SENTENCEPIECE)
    tokenizer.post_processor = _frame(tokenizer, special, begins=begins, ends=metadata.get("ggml.add_eos_token", False))
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.metadata.get(f"{header.metadata['general.architecture']}.context_length"),
        "chat_template": metadata.get("chat_template"),
        **special,
    }


def _token(header: GgufHeader, tokens: list[str], number: Any) -> str | None:
    """The text of a special token."""
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise GgufError(f"{header.path}: there is no token {number} among {len(tokens)}")
    return tokens[number]


def _frame(tokenizer: Tokenizer, special: dict[str, str | None], *, begins: bool, ends: bool) -> Any:
    """The post-processor that adds the special tokens around a text."""
    first, last = (special["bos_token"] if begins else None), (special["eos_token"] if ends else None)
    around = [token for token in (first, last) if token is not None]
    if not around:
        return tokenizer.post_processor
    words = [word for word in (first, "$A", last) if word is not None]
    return TemplateProcessing(single=words, special_tokens=[(token, tokenizer.token_to_id(token)) for token in around])
