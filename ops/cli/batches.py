"""`batch`: offline jobs over the Files and Batch APIs."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.ids import whole_id
from ops.cli.listing import print_pages
from ops.client.api import UPLOAD_TIMEOUT_S, Api, CommandError, connected, path_to
from ops.client.polling import reread
from ops.client.screen import AsJson, Columns, print_fields, print_json, print_table, progress_bar, time_text

_ERRORS_SHOWN = 20
batches = typer.Typer(no_args_is_help=True, help="Batches: offline jobs of many requests.")

_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
BatchId = Annotated[
    str, typer.Argument(metavar="BATCH", help="Its id, the first characters of it, or `latest`: the newest of all.")
]
OutputFile = Annotated[Path | None, typer.Option("--output", "-o", dir_okay=False, help="File for the results.")]


@batches.command("submit")
@examples(
    "tidepool batch submit requests.jsonl -o results.jsonl", "tidepool batch submit requests.jsonl --no-watch --json"
)
def submit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON lines, one request each.")],
    window: Annotated[str, typer.Option(help="Completion window.")] = "24h",
    watch: Annotated[bool, typer.Option(help="Wait until it has ended, and show progress.")] = True,
    output: OutputFile = None,
    as_json: AsJson = False,
) -> None:
    """Upload requests, create a batch of them, and wait until it has ended."""
    endpoint = _endpoint_of(file)
    if output is not None:
        _require_writable(output)
    with connected(context, as_client=True) as api:
        with file.open("rb") as stream:
            uploaded = api.send(
                "POST",
                "/v1/files",
                files={"file": (file.name, stream, "application/jsonl")},
                data={"purpose": "batch"},
                timeout=UPLOAD_TIMEOUT_S,
            )
        body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
        batch = api.post("/v1/batches", body)
        typer.echo(f"batch {batch['id']}", err=True)
        try:
            if watch or output is not None:
                batch = _watch(api, batch)
            if output is not None and batch["output_file_id"]:
                _save(api, batch["output_file_id"], output)
        except CommandError as error:
            raise CommandError(f"{error}; the results: tidepool batch output {batch['id']} -o FILE") from error
    show_batch(batch, as_json=as_json)
    if batch["status"] in _ENDED - {"completed"}:
        raise CommandError(f"batch {batch['id']} is {batch['status']}{_first_error(batch)}")


@batches.command("list")
@examples("tidepool batch list")
def list_batches(context: typer.Context, as_json: AsJson = False) -> None:
    """List batches, the newest first."""
    columns: Columns = {
        "batch": "id",
        "status": "status",
        "done": lambda row: f"{_done(row)} of {row['request_counts']['total']}",
        "failed": lambda row: row["request_counts"]["failed"],
        "ends": lambda row: _end_text(row) or "",
        "created": lambda row: time_text(row["created_at"]),
    }
    print_pages(context, "/v1/batches", "Batches", columns, as_json=as_json, as_client=True)


@batches.command("show")
@examples("tidepool batch show latest", "tidepool batch show batch_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 --watch")
def show(
    context: typer.Context,
    batch_id: BatchId,
    watch: Annotated[bool, typer.Option("--watch", help="Wait until it has ended, and show progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a batch."""
    with connected(context, as_client=True) as api:
        batch_id = whole_id(api, "batch", batch_id)
        batch = api.get(path_to("/v1/batches", batch_id))
        if watch:
            batch = _watch(api, batch)
    show_batch(batch, as_json=as_json)


@batches.command("cancel")
@examples("tidepool batch cancel batch_0190f3c2a7b57c1e8d2f4b6a8c0e1f23")
def cancel(context: typer.Context, batch_id: BatchId, as_json: AsJson = False) -> None:
    """Cancel a batch; results that exist are kept."""
    with connected(context, as_client=True) as api:
        batch_id = whole_id(api, "batch", batch_id)
        batch = api.post(path_to("/v1/batches", batch_id, "cancel"))
    show_batch(batch, as_json=as_json)


@batches.command("output")
@examples("tidepool batch output batch_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 -o results.jsonl")
def output(
    context: typer.Context,
    batch_id: BatchId,
    output: OutputFile = None,
    errors: Annotated[bool, typer.Option("--errors", help="Write the failed lines instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a batch's results to a file, or to standard output. The format is JSON lines in any case."""
    with connected(context, as_client=True) as api:
        batch_id = whole_id(api, "batch", batch_id)
        batch = api.get(path_to("/v1/batches", batch_id))
        file_id = batch["error_file_id" if errors else "output_file_id"]
        if file_id is None:
            raise CommandError(f"batch {batch_id} ({batch['status']}) has no {'error' if errors else 'output'} file")
        _save(api, file_id, output)
    if output is not None:
        if as_json:
            print_json(batch)
        else:
            typer.echo(f"{output} holds the lines of {file_id}")


def _endpoint_of(file: Path) -> str:
    """The endpoint of the first request, which the Batch API takes as the endpoint of the batch."""
    try:
        with file.open(encoding="utf-8") as stream:
            first = json.loads(next((line for line in stream if line.strip()), "null"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{file}: line 1 is not valid JSON: {error}") from error
    url = first.get("url") if isinstance(first, dict) else None
    if not isinstance(url, str):
        raise CommandError(f"{file}: line 1 must be a request object with a url such as /v1/chat/completions")
    return url


def _require_writable(target: Path) -> None:
    """Refuse a file that could not be written when the batch has ended, which may be a day later.

    Raises:
        CommandError: its folder is missing, or this user may not write it.
    """
    if not target.parent.is_dir():
        raise CommandError(f"--output: {target.parent} is no folder")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise CommandError(f"--output: {target} may not be written")


def _watch(api: Api, batch: dict[str, Any]) -> dict[str, Any]:
    with progress_bar(batch["status"]) as report:
        while True:
            report(batch["status"], _done(batch), batch["request_counts"]["total"] or None)
            if batch["status"] in _ENDED:
                return batch
            batch = reread(api, path_to("/v1/batches", batch["id"]))


def _done(batch: Mapping[str, Any]) -> int:
    counts = batch["request_counts"]
    return int(counts["completed"] + counts["failed"])


def _save(api: Api, file_id: str, target: Path | None) -> None:
    with api.stream(path_to("/v1/files", file_id, "content")) as pieces:
        if target is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return
        try:
            with target.open("wb") as stream:
                stream.writelines(pieces)
        except OSError as error:
            raise CommandError(f"{target} cannot be written: {error}") from error


def show_batch(batch: dict[str, Any], *, as_json: bool) -> None:
    """Print a batch: its state and counts, errors of its input, and the commands that read its files."""
    if as_json:
        print_json(batch)
        return
    counts = batch["request_counts"]
    print_fields(
        [
            ("batch", batch["id"]),
            ("status", batch["status"]),
            ("requests", f"{counts['total']}: {counts['completed']} completed, {counts['failed']} failed"),
            ("created", time_text(batch["created_at"])),
            ("predicted end", _end_text(batch)),
            ("because", (batch.get("tidepool") or {}).get("reason")),
            ("results", _file_text(batch, "output_file_id", "")),
            ("failed lines", _file_text(batch, "error_file_id", " --errors")),
        ]
    )
    errors = (batch.get("errors") or {}).get("data") or []
    if errors:
        columns: Columns = {"line": "line", "param": "param", "code": "code", "message": "message"}
        print_table("Errors of the input file", columns, errors[:_ERRORS_SHOWN])
    if len(errors) > _ERRORS_SHOWN:
        more = len(errors) - _ERRORS_SHOWN
        typer.echo(f"{more} more: tidepool batch show {batch['id']} --json")


def _end_text(batch: Mapping[str, Any]) -> str | None:
    """When the batch will end, as far as is known."""
    known = batch.get("tidepool") or {}
    if not known.get("reason"):
        return None
    at = known["predicted_end_at"]
    shown = "unknown" if at is None else time_text(at)
    return f"{shown}, AT RISK" if known["at_risk"] else shown


def _file_text(batch: Mapping[str, Any], field: str, option: str) -> str | None:
    """A file of the batch, and how to read it."""
    file_id = batch[field]
    return None if file_id is None else f"{file_id} (tidepool batch output {batch['id']}{option} -o FILE)"


def _first_error(batch: dict[str, Any]) -> str:
    errors = (batch.get("errors") or {}).get("data") or []
    if not errors:
        return ""
    line = f"line {errors[0]['line']}: " if errors[0].get("line") else ""
    return f": {line}{errors[0].get('message')}" + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")
