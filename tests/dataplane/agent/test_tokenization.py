"""Tokenizers of checkpoint folders and of replayed models."""

import json
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dataplane.agent.tokenization import CheckpointTokenizer, WordTokenizer, load_tokenizer
from dataplane.engines.replay.vocabulary import WORDS
from dataplane.protocol.errors import BadRequestError, ContextLengthError, ModelLoadError

MANY = 10_000


def test_word_text_goes_there_and_back() -> None:
    words = WordTokenizer()
    assert words.decode(words.encode_text("the tide  turns", tokens_max=MANY)) == "the tide turns"
    assert words.encode_text("unheard", tokens_max=MANY) == words.encode_text("unheard", tokens_max=MANY)
    with pytest.raises(BadRequestError, match=str(len(WORDS))):
        words.check_tokens([0, len(WORDS)], "prompt_tokens")


def write_tokenizer(folder: Path, template: str | None) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[bot]"


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TEMPLATE)
    tokenizer = CheckpointTokenizer(tmp_path)
    ids = tokenizer.encode_text("<s>[user]hello</s>[bot]", tokens_max=MANY, special=False)
    assert tokenizer.decode(ids) == "[user]hello[bot]", "special tokens are left out of the text"
    assert (ids[0], len(ids)) == (256, 1 + len("[user]hello") + 1 + len("[bot]"))
    assert tokenizer.decode(tokenizer.encode_text("tide 😀", tokens_max=MANY)) == "tide 😀"
    assert (tokenizer.special_id("</s>"), tokenizer.special_id("a"), tokenizer.token_text(257)) == (257, None, "</s>")
    assert tokenizer.template is not None
    assert tokenizer.template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    with pytest.raises(BadRequestError, match="token 258"):
        tokenizer.check_tokens([258], "prompt_tokens")


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_prompt_longer_than_the_model_takes_is_refused(tmp_path: Path, template: str | None) -> None:
    write_tokenizer(tmp_path, template)
    for tokenizer in (CheckpointTokenizer(tmp_path), WordTokenizer()):
        long = "tide " * 20
        exact = len(tokenizer.encode_text(long, tokens_max=MANY))
        assert len(tokenizer.encode_text(long, tokens_max=exact)) == exact
        with pytest.raises(ContextLengthError, match=f"at most {exact - 1} here") as refused:
            tokenizer.encode_text(long, tokens_max=exact - 1)
        assert refused.value.param == "prompt"
        with pytest.raises(ContextLengthError) as refused:
            tokenizer.encode_text(long, tokens_max=exact - 1, param="messages")
        assert refused.value.param == "messages"


def test_what_cannot_fit_is_never_tokenized(tmp_path: Path) -> None:
    """Its 2**20 tokens are not counted to the end."""
    write_tokenizer(tmp_path, None)
    with pytest.raises(ContextLengthError, match="at least 16384 tokens; the model takes at most 99 here"):
        CheckpointTokenizer(tmp_path).encode_text("x" * 2**20, tokens_max=99)


def test_other_threads_run_while_a_long_prompt_is_tokenized(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, None)
    tokenizer = CheckpointTokenizer(tmp_path)
    made: list[int] = []
    thread = threading.Thread(
        target=lambda: made.append(len(tokenizer.encode_text("tide " * 100_000, tokens_max=10**6)))
    )
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0)
        turns += 1
    assert made == [500_000]
    assert turns > 100, "the tokenizer kept the interpreter to itself"


def test_load_tokenizer(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(str(tmp_path / "none"), "replay"), WordTokenizer)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        load_tokenizer(str(tmp_path), "torch")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be used"):
        load_tokenizer(str(tmp_path), "replay")
