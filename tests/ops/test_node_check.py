"""`tidepool node check`: what it says of good models, and that it notices bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.engines.torch import attention
from ops import interleaving
from ops.cli import main
from tests.dataplane.engines.torch.tiny import save_tiny

QUICK = ("--prompts", "2", "--tokens", "5", "--switches", "6")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [str(save_tiny(architecture, root / architecture)) for architecture in ("mistral", "qwen3_moe")]


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["node", "check", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status, out, _ = check(capsys, *arguments, "--json")
    return status, json.loads(out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_good_models_pass_and_everything_was_tried(
    dtype: str, folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = report(capsys, *folders, *QUICK, "--dtype", dtype)
    assert (status, said["failed"]) == (0, [])
    assert [model["architecture"] for model in said["models"]] == ["mistral", "qwen3_moe"]
    assert all(model["tokens"] >= 5 for model in said["models"])
    assert said["models"][0]["prompt_tokens_max"] > said["models"][0]["window_tokens"]
    assert (said["switches"] >= 6, said["resident_max"], said["left"] > 0) == (True, 1, True)
    assert said["swapped_out"] == said["swapped_in"] > 0


def test_the_table_names_the_architectures(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = check(capsys, folders[0], *QUICK)
    assert status == 0
    assert "mistral" in out
    assert "yes" in out


def test_a_wrong_token_fails_the_check(
    folders: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.KvStep, "mask", _mask_without_window)
    status, out, err = check(capsys, *folders, "--prompts", "2", "--tokens", "8", "--json")
    said = json.loads(out)
    assert (status, said["failed"]) == (1, ["mistral"])
    assert any("instead of" in mismatch for mismatch in said["models"][0]["mismatches"])
    assert "not the tokens and logits of transformers: mistral" in err


def _mask_without_window(self: attention.KvStep, index: int, window: int | None, groups: int) -> torch.Tensor:
    return _MASK(self, index, None, groups)


_MASK = attention.KvStep.mask


def test_nearly_tied_tokens_are_counted_and_what_follows_is_compared(
    folders: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, strict = report(capsys, folders[0], *QUICK)
    assert status == 0
    second = "dataplane.engines.torch.steps.choose_tokens"
    monkeypatch.setattr(second, lambda logits, draws: logits.topk(2, dim=-1).indices[:, 1].tolist())
    monkeypatch.setitem(interleaving.TOLERANCES, "float32", 10.0)
    status, lax = report(capsys, folders[0], *QUICK)
    assert status == 0
    assert lax["models"][0]["ties"] == lax["models"][0]["tokens"] >= strict["models"][0]["tokens"]
    monkeypatch.setitem(interleaving.TOLERANCES, "float32", 1e-4)
    status, refused = report(capsys, folders[0], *QUICK)
    assert (status, refused["failed"]) == (1, ["mistral"])


def test_what_cannot_be_checked_is_said_in_one_line(
    folders: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, err = check(capsys, str(tmp_path), *QUICK)
    assert status == 1
    assert "config.json does not exist" in err.splitlines()[-1]
    status, _, err = check(capsys, folders[0], "--tokens", "5000")
    assert status == 1
    assert "a context of 256 tokens" in err.splitlines()[-1]
    if not torch.cuda.is_available():
        status, _, err = check(capsys, folders[0], "--device", "cuda")
        assert (status, err.splitlines()[-1]) == (1, "error: no CUDA device can be used here")
