"""How text is split before its merges, by the names that GGUF has for it."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="install the gguf extra")

from gguf import GGUFWriter

from ops.gguf.header import GgufError, read_header
from ops.gguf.tokenizers import build_tokenizer
from ops.local.tiny_models import END_TOKEN, train_tokenizer
from tests.ops.gguf.files import finish, write_tokenizer


def file_of(folder: Path, **changes: object) -> Path:
    writer = GGUFWriter(folder / "a.gguf", "llama")
    write_tokenizer(writer, **changes)
    writer.add_tensor("a", np.zeros(4, np.float32))
    finish(writer)
    return folder / "a.gguf"


def test_smollm_takes_each_digit_and_the_blanks_before_it_apart(tmp_path: Path) -> None:
    text = "in  2024"
    tokens = build_tokenizer(read_header(file_of(tmp_path, pre="smollm")))[0].encode(text).tokens
    assert tokens[-5:] == ["ĠĠ", "2", "0", "2", "4"] or tokens[-6:] == ["Ġ", "Ġ", "2", "0", "2", "4"]
    assert tokens != train_tokenizer().encode(text).tokens


def test_a_text_begins_with_the_token_that_the_file_asks_for(tmp_path: Path) -> None:
    tokenizer, config = build_tokenizer(read_header(file_of(tmp_path, begins=True)))
    assert tokenizer.encode("tide").tokens[0] == END_TOKEN == config["bos_token"]
    assert END_TOKEN not in tokenizer.encode("tide", add_special_tokens=False).tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "whatever"}, "tokenizer.ggml.pre = 'whatever' is not supported"),
        ({"model": "bert"}, "the tokenizer 'bert' is not supported; supported are gpt2 and llama"),
    ],
)
def test_unknown_ones_are_refused(changes: dict[str, str], words: str, tmp_path: Path) -> None:
    header = read_header(file_of(tmp_path, **changes))
    with pytest.raises(GgufError, match=words):
        build_tokenizer(header)
