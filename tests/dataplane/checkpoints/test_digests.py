"""The digest of a checkpoint: of its content, wherever it is."""

import json
import os
from pathlib import Path

import pytest

from dataplane.checkpoints import digests
from dataplane.protocol.errors import ModelLoadError


def checkpoint_digest(folder: Path) -> str:
    return digests.checkpoint_digest(folder, lambda: True)


def write(folder: Path, weight: bytes = b"\x00\x00\x80\x3f", config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weight)
    (folder / "config.json").write_text(config)
    return folder


def test_it_is_of_weights_and_configuration(tmp_path: Path) -> None:
    one, same = write(tmp_path / "one"), write(tmp_path / "same")
    (same / "README.md").write_text("a copy")
    digest = checkpoint_digest(one)
    assert checkpoint_digest(same) == digest
    others = {
        checkpoint_digest(write(tmp_path / "weight", weight=b"\x01\x00\x80\x3f")),
        checkpoint_digest(write(tmp_path / "config", config='{"rope_theta": 1}')),
    }
    assert len(others | {digest}) == 3


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    digest = checkpoint_digest(folder)
    write(folder, weight=b"\x01\x00\x80\x3f")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert checkpoint_digest(folder) != digest


def test_no_checkpoint_has_none(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        checkpoint_digest(tmp_path / "nowhere")


def test_a_checkpoint_that_is_wanted_no_more_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_CHUNK_BYTES", 1)
    folder = write(tmp_path / "one")
    asked: list[bool] = []

    def is_wanted() -> bool:
        asked.append(len(asked) < 3)
        return asked[-1]

    with pytest.raises(ModelLoadError, match="one is not wanted any longer"):
        digests.checkpoint_digest(folder, is_wanted)
    assert asked.count(False) <= 2, "each of the two files is read no further"
    assert checkpoint_digest(folder) == checkpoint_digest(write(tmp_path / "same"))
