"""Tokens to text as they come: whole characters, right blanks, stop strings over token borders; tokenizer folders."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dataplane.agent.tokenization import CheckpointTokenizer, IncrementalDetokenizer, WordTokenizer, load_tokenizer
from dataplane.engines.replay.vocabulary import WORDS
from dataplane.protocol.errors import BadRequestError, ContextLengthError, ModelLoadError
from dataplane.protocol.messages import ChatMessage

CHAT = (ChatMessage(role="user", content="hello"),)
MANY = 10_000


class ByteTokenizer(WordTokenizer):
    """One token a byte: every multi-byte character is split over tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def stream(data: bytes, *stop: str) -> tuple[list[str], IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), stop)
    pieces = []
    for token_id in data:
        pieces.append(detokenizer.feed(token_id))
        if detokenizer.stopped:
            return pieces, detokenizer
    return [*pieces, detokenizer.finish()], detokenizer


def test_characters_are_never_broken() -> None:
    pieces, _ = stream("aé€😀b".encode())
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "b"]


@given(st.text(max_size=30))
def test_the_pieces_make_the_whole(text: str) -> None:
    pieces, _ = stream(text.encode())
    assert "".join(pieces) == text


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_come_out_too(data: bytes) -> None:
    pieces, _ = stream(data)
    assert all(isinstance(piece, str) for piece in pieces)
    kept = [c for c in data.decode("utf-8", errors="ignore") if c.isascii()]
    assert [c for c in "".join(pieces) if c.isascii()] == kept


def test_bytes_that_never_make_a_character_are_not_held_for_ever() -> None:
    pieces, _ = stream(b"\xf0" * 40)
    assert any(pieces[:-1])


def test_a_stop_string_over_many_tokens_is_held_back_and_cut() -> None:
    pieces, detokenizer = stream(b"one END two", "END")
    assert "".join(pieces) == "one "
    assert detokenizer.stopped
    assert detokenizer.feed(ord("x")) == ""
    assert detokenizer.finish() == ""


def test_a_false_start_of_a_stop_string_is_released() -> None:
    pieces, detokenizer = stream(b"EN-ENE", "END")
    assert pieces == ["", "", "EN-", "", "", "EN", "E"]
    assert not detokenizer.stopped


@pytest.mark.parametrize(
    ("data", "stop", "expected"),
    [
        ("aab", ("ab",), "a"),
        ("abc", ("c", "bc"), "a"),  # the stop that begins first wins
        ("aaab", ("aab",), "a"),
        ("stop", ("stop",), ""),
        ("x😀y", ("😀",), "x"),
        ("nothing", ("else",), "nothing"),
    ],
)
def test_stops(data: str, stop: tuple[str, ...], expected: str) -> None:
    pieces, detokenizer = stream(data.encode(), *stop)
    assert "".join(pieces) == expected
    assert detokenizer.stopped == (data != expected)


@given(st.text(alphabet="ab", max_size=20), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_stop_is_where_a_search_of_the_whole_text_ends(text: str, stop: list[str]) -> None:
    """The text ends before the stop string that is complete first; of those, before the one that begins first."""
    ends = sorted((text.index(s) + len(s), text.index(s)) for s in stop if s in text)
    pieces, detokenizer = stream(text.encode(), *stop)
    if not ends:
        assert "".join(pieces) == text
    else:
        assert "".join(pieces) == text[: min(begin for end, begin in ends if end == ends[0][0])]
    assert detokenizer.stopped == bool(ends)


def test_words_have_blanks_between_them_and_none_in_front() -> None:
    detokenizer = IncrementalDetokenizer(WordTokenizer())
    ids = [WORDS.index(word) for word in ("the", "tide", "turns")]
    assert [detokenizer.feed(token_id) for token_id in ids] == ["the", " tide", " turns"]
    assert detokenizer.finish() == ""


def test_word_text_goes_there_and_back() -> None:
    words = WordTokenizer()
    assert words.decode(words.encode_text("the tide  turns", tokens_max=MANY)) == "the tide turns"
    assert words.encode_text("unheard", tokens_max=MANY) == words.encode_text("unheard", tokens_max=MANY)
    assert len(words.encode_chat(CHAT, tokens_max=MANY)) == 3
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


def test_a_checkpoint_folder_with_a_chat_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TEMPLATE)
    tokenizer = CheckpointTokenizer(tmp_path)
    ids = tokenizer.encode_chat(CHAT, tokens_max=MANY)
    assert tokenizer.decode(ids) == "[user]hello[bot]", "special tokens are left out of the text"
    assert (ids[0], len(ids)) == (256, 1 + len("[user]hello") + 1 + len("[bot]"))
    assert tokenizer.decode(tokenizer.encode_text("tide 😀", tokens_max=MANY)) == "tide 😀"
    with pytest.raises(BadRequestError, match="token 258"):
        tokenizer.check_tokens([258], "prompt_tokens")


def test_a_checkpoint_folder_without_a_chat_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, None)
    tokenizer = CheckpointTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT, tokens_max=MANY)) == "user: hello\nassistant:"


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
            tokenizer.encode_chat((ChatMessage(role="user", content=long),), tokens_max=exact - 1)
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


def test_a_template_may_refuse(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "{{ raise_exception('no system role') }}")
    with pytest.raises(BadRequestError, match="no system role"):
        CheckpointTokenizer(tmp_path).encode_chat(CHAT, tokens_max=MANY)


def test_a_stream_of_a_checkpoint_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, None)
    tokenizer = CheckpointTokenizer(tmp_path)
    streamed = IncrementalDetokenizer(tokenizer, ["END"])
    assert (
        "".join(streamed.feed(i) for i in tokenizer.encode_text("grüße 😀 END not this", tokens_max=MANY))
        == "grüße 😀 "
    )


def test_load_tokenizer(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(str(tmp_path / "none"), "replay"), WordTokenizer)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        load_tokenizer(str(tmp_path), "torch")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be used"):
        load_tokenizer(str(tmp_path), "replay")
