"""`model convert` and `model add --path FILE.gguf`, as they are typed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.cli.main import app

pytest.importorskip("gguf", reason="install the gguf extra")

from tests.ops.gguf.files import save_original, write_gguf

RUN = CliRunner()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    return write_gguf(save_original("llama", folder / "original"), folder / "tiny.gguf")


def test_a_file_becomes_a_folder_beside_it_once(file: Path) -> None:
    first = RUN.invoke(app, ["model", "convert", str(file), "--json"])
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout)
    assert told["converted"] is True
    assert told["path"] == str(file.with_suffix(""))
    assert told["architecture"] == "LlamaForCausalLM"
    again = RUN.invoke(app, ["model", "convert", str(file)])
    assert "there already, from the same file" in again.stdout


def test_what_cannot_be_converted_is_said(tmp_path: Path) -> None:
    file = tmp_path / "zip.gguf"
    file.write_bytes(b"PK\3\4")
    for words in (["model", "convert", str(file)], ["model", "add", "a", "--path", str(file)]):
        ended = RUN.invoke(app, words)
        assert ended.exit_code == 1
        assert "is no GGUF file: it does not begin with GGUF" in " ".join(str(ended.exception or ended.output).split())


def test_another_folder_is_for_a_gguf_file_only(tmp_path: Path) -> None:
    ended = RUN.invoke(app, ["model", "add", "a", "--path", str(tmp_path), "--to", str(tmp_path / "b")])
    assert ended.exit_code == 2
    assert "--to is for a GGUF file" in ended.output
