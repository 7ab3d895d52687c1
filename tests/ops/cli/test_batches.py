"""`batch show`: what it says of a batch that failed, and of one that runs; what `batch submit` says before it waits."""

import json
from pathlib import Path
from typing import Any

import pytest

from ops.cli import batches
from ops.cli.batches import show_batch
from ops.client.api import UnreachableError
from tests.ops.cli.running import Run


def _batch(**values: Any) -> dict[str, Any]:
    counts = {"total": 0, "completed": 0, "failed": 0}
    known = {"id": "batch_1", "status": "failed", "request_counts": counts, "created_at": 0, "errors": None}
    return known | {"output_file_id": None, "error_file_id": None} | values


def test_errors_of_the_input_file_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [
        {
            "line": line,
            "param": "body.model",
            "code": "model_not_found",
            "message": f"The model 'm{line}' does not exist.",
        }
        for line in range(1, 31)
    ]
    show_batch(_batch(errors={"object": "list", "data": errors}), as_json=False)
    shown = capsys.readouterr().out
    for words in ("The model 'm1' does not exist.", "body.model", "model_not_found", "The model 'm20' does not exist."):
        assert words in shown, words
    assert "m21" not in shown
    assert "10 more: tidepool batch show batch_1 --json" in shown


def test_files_are_shown_with_the_command_that_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    show_batch(_batch(status="completed", output_file_id="file-1", error_file_id="file-2"), as_json=False)
    shown = capsys.readouterr().out
    assert "file-1 (tidepool batch output batch_1 -o FILE)" in shown
    assert "file-2 (tidepool batch output batch_1 --errors -o FILE)" in shown
    assert "Errors of the input file" not in shown


def test_the_predicted_end_is_shown_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    running = _batch(status="in_progress")
    known = {"predicted_end_at": 1_800_000_000, "at_risk": True, "reason": "too many lines"}
    show_batch(running | {"tidepool": known}, as_json=False)
    shown = capsys.readouterr().out
    assert "2027-01-15" in shown
    assert "AT RISK" in shown
    assert "too many lines" in shown
    show_batch(running | {"tidepool": known | {"predicted_end_at": None, "at_risk": False}}, as_json=False)
    assert "unknown" in capsys.readouterr().out
    for nothing in ({"tidepool": None}, {"tidepool": known | {"reason": None}}, {}):
        show_batch(running | nothing, as_json=False)
        shown = capsys.readouterr().out
        assert "AT RISK" not in shown
        assert "unknown" not in shown


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of one request."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line))
    return tmp_path / "requests.jsonl"


def test_a_file_that_cannot_be_written_is_refused_before_the_upload(served: Run, lines: Path, tmp_path: Path) -> None:
    refused = served("batch", "submit", lines, "-o", tmp_path / "absent" / "results.jsonl")
    assert refused.status == 1
    assert f"{tmp_path / 'absent'} is no folder" in refused.err
    assert served("batch", "list", "--json").json["data"] == []


def test_the_id_is_known_from_the_beginning_and_named_by_an_error(
    served: Run, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise UnreachableError("http://x cannot be reached")

    monkeypatch.setattr(batches, "reread", gone)
    ended = served("batch", "submit", lines)
    batch = served("batch", "list", "--json").json["data"][0]["id"]
    assert ended.status == 1
    assert f"batch {batch}\n" in ended.err
    assert f"cannot be reached; the results: tidepool batch output {batch} -o FILE" in ended.err
