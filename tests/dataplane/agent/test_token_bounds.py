"""The least tokens of a text, against tokenizers of the kinds that checkpoints have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dataplane.agent.token_bounds import TokenBound

TEXT = ["the tide turns and the tides turn", "        return tide", "àé ΐ 힣 €€ ~~~~ ====", "▁▁ the▁tide"] * 3
TEXTS = st.text(max_size=60) | st.text(alphabet="the tides▁\u0301\u0308\u1fbe\u212b \t=<s>", max_size=200)


def _trained(tokenizer: Any, alphabet: list[str], added: list[AddedToken], *first: str) -> Any:
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=[*first, *added], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_level(*, nfc: bool = False, rstrip: bool = False) -> Any:
    """GPT-2's kind; with a regex, Llama 3's; with NFC, Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s+|\w+|[^\s\w]+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(tokenizer, alphabet, [AddedToken("<s>", rstrip=rstrip, special=True)])


def sentencepiece() -> Any:
    """Llama 2's kind: no pre-tokenizer, blanks are letters, unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    return _trained(tokenizer, [], [AddedToken("<s>")], "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)))


KINDS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "NFC": lambda: byte_level(nfc=True),
    "tokens that swallow blanks": lambda: byte_level(rstrip=True),
    "sentencepiece": sentencepiece,
}


@pytest.fixture(scope="module", params=KINDS)
def bounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TokenBound]:
    tokenizer = KINDS[request.param]()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    bound = TokenBound.of_file(path)
    assert bound is not None
    return tokenizer, bound


@given(TEXTS)
@settings(max_examples=300)
def test_no_text_has_fewer_tokens(bounded: tuple[Any, TokenBound], text: str) -> None:
    tokenizer, bound = bounded
    count = len(tokenizer.encode(text, add_special_tokens=False))
    assert bound.least_tokens(text, enough=10**6) <= count


def test_the_bound_is_near_for_what_a_vocabulary_knows(bounded: tuple[Any, TokenBound]) -> None:
    tokenizer, bound = bounded
    text = "xq" * 1000
    count = len(tokenizer.encode(text, add_special_tokens=False))
    assert bound.least_tokens(text, enough=10**6) > count // 4


def test_counting_ends_when_it_is_enough(bounded: tuple[Any, TokenBound]) -> None:
    _, bound = bounded
    enough = bound.least_tokens("x" * 2**20, enough=10)
    assert 10 < enough < 2**18


UNSURE: dict[str, Callable[[Any], object]] = {
    "letters are lost": lambda file: file.update(normalizer={"type": "StripAccents"}),
    "text is replaced": lambda file: file.update(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": " +"}, "content": ""}]}
    ),
    "blanks are dropped": lambda file: file.update(pre_tokenizer={"type": "WhitespaceSplit"}),
    "pieces are removed": lambda file: file["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    "text is cut off": lambda file: file.update(truncation={"max_length": 8}),
    "a byte is unknown": lambda file: file["model"]["vocab"].pop("Ā"),
    "words of a list": lambda file: file["model"].update(type="WordPiece"),
    "words with an end": lambda file: file["model"].update(end_of_word_suffix="</w>"),
}


@pytest.mark.parametrize("change", UNSURE.values(), ids=UNSURE.keys())
def test_nothing_is_said_where_text_may_get_lost(tmp_path: Path, change: Callable[[Any], object]) -> None:
    file = json.loads(byte_level().to_str())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file))
    assert TokenBound.of_file(path) is not None
    change(file)
    path.write_text(json.dumps(file))
    assert TokenBound.of_file(path) is None
