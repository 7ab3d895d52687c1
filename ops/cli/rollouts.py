"""`rollout`: another model replaces those of an alias, step by step."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.ids import whole_id
from ops.cli.listing import print_pages
from ops.client.api import Api, connected, path_to
from ops.client.polling import reread
from ops.client.screen import AsJson, Columns, print_answer, print_fields, print_json, same
from ops.client.times import duration_s

_ENDED = {"done", "rolled_back"}
RolloutId = Annotated[
    str, typer.Argument(metavar="ROLLOUT", help="Its id, the first characters of it, or `latest`: the newest of all.")
]
rollouts = typer.Typer(no_args_is_help=True, help="Roll-outs: another model replaces those of an alias, step by step.")


@rollouts.command("start")
@examples(
    "tidepool rollout start chat qwen3-8b-r2 --steps 5,25,50,100 --hold 10m",
    "tidepool rollout start qwen3-8b qwen3-8b-r2 --follow      a model's own name becomes an alias of it",
)
def start_rollout(
    context: typer.Context,
    alias: str,
    model: Annotated[str, typer.Argument(help="The candidate.")],
    steps: Annotated[str, typer.Option(metavar="PERCENT,...", help="Its shares, rising.")] = "5,25,50,100",
    hold: Annotated[str, typer.Option(metavar="TIME", help="How long each step lasts at least: 30s, 10m, 2h.")] = "10m",
    answers: Annotated[int, typer.Option(min=0, help="Answers of the candidate that each step waits for.")] = 100,
    worse: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="It goes back where its share of failed or late answers exceeds the others' by more."
        ),
    ] = 0.02,
    keep: Annotated[
        bool, typer.Option("--keep/--shrink", help="Whether the models before keep their instances until the end.")
    ] = True,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what happens until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Begin a roll-out: the candidate gets instances, then a share of the requests, then more of them. It goes back by
    itself where it is worse than the models before.
    """
    body = {"alias": alias, "model": model, "steps": _steps(steps), "hold_s": float(duration_s(hold))}
    body |= {"answers_min": answers, "worse_max": worse, "keep": keep}
    with connected(context) as api:
        answer = api.post("/admin/rollouts", body)
        print_answer(answer, f"{answer['id']}: {alias} becomes {model} in steps of {_shares(answer)}", as_json=as_json)
        if follow:
            _follow(api, answer)


@rollouts.command("list")
@examples("tidepool rollout list", "tidepool rollout list --live")
def list_rollouts(
    context: typer.Context,
    live: Annotated[bool, typer.Option("--live", help="Leave out those that have ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """List roll-outs, the newest first."""
    columns: Columns = {
        "roll-out": "id",
        **same("alias", "model", "state"),
        "share": _share,
        "reason": "reason",
        "by": "created_by",
    }
    print_pages(context, "/admin/rollouts", "Roll-outs", columns, as_json=as_json, live_only=live)


@rollouts.command("show")
@examples("tidepool rollout show latest", "tidepool rollout show latest --follow")
def show_rollout(
    context: typer.Context,
    rollout_id: RolloutId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what happens until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a roll-out: its share, what it waits for, and how its answers compare."""
    with connected(context) as api:
        answer = api.get(path_to("/admin/rollouts", whole_id(api, "rollout", rollout_id)))
        if as_json:
            print_json(answer)
        else:
            _print(answer)
        if follow:
            _follow(api, answer)


@rollouts.command("pause")
@examples("tidepool rollout pause latest")
def pause_rollout(context: typer.Context, rollout_id: RolloutId, as_json: AsJson = False) -> None:
    """Stay at the present share. It still goes back by itself."""
    _change(context, rollout_id, "pause", as_json=as_json)


@rollouts.command("resume")
@examples("tidepool rollout resume latest")
def resume_rollout(context: typer.Context, rollout_id: RolloutId, as_json: AsJson = False) -> None:
    """Let a paused roll-out go on."""
    _change(context, rollout_id, "resume", as_json=as_json)


@rollouts.command("promote")
@examples("tidepool rollout promote latest")
def promote_rollout(context: typer.Context, rollout_id: RolloutId, as_json: AsJson = False) -> None:
    """End the waiting of the present step; the next one still waits for the instances that it needs."""
    _change(context, rollout_id, "promote", as_json=as_json)


@rollouts.command("rollback")
@examples("tidepool rollout rollback latest")
def roll_back(context: typer.Context, rollout_id: RolloutId, as_json: AsJson = False) -> None:
    """Go back to the models before, at once."""
    _change(context, rollout_id, "rollback", as_json=as_json)


def _change(context: typer.Context, rollout_id: str, what: str, *, as_json: bool) -> None:
    with connected(context) as api:
        answer = api.post(path_to("/admin/rollouts", whole_id(api, "rollout", rollout_id), what), {})
    print_answer(answer, _line(answer), as_json=as_json)


def _follow(api: Api, rollout: dict[str, Any]) -> None:
    """Print a line for each change until the roll-out has ended. One that went back ends the command with status 1."""
    shown = ""
    while True:
        if (line := _line(rollout)) != shown:
            typer.echo(line)
            shown = line
        if rollout["state"] in _ENDED:
            raise typer.Exit(int(rollout["state"] == "rolled_back"))
        rollout = reread(api, path_to("/admin/rollouts", rollout["id"]))


def _print(rollout: Mapping[str, Any]) -> None:
    print_fields(
        [
            ("roll-out", rollout["id"]),
            ("alias", rollout["alias"]),
            ("candidate", rollout["model"]),
            ("state", f"{rollout['state']}: {rollout['reason']}"),
            ("share", f"{_share(rollout)} of steps {_shares(rollout)}"),
            ("candidate's answers", _counts(rollout["candidate"])),
            ("the others' answers", _counts(rollout["baseline"])),
        ]
    )


def _line(rollout: Mapping[str, Any]) -> str:
    return f"{rollout['alias']}: {_share(rollout)} {rollout['model']}, {rollout['state']}: {rollout['reason']}"


def _share(rollout: Mapping[str, Any]) -> str:
    if rollout["state"] == "rolled_back":
        return "0 %"
    return f"{rollout['steps'][rollout['step']] if rollout['step'] >= 0 else 0} %"


def _shares(rollout: Mapping[str, Any]) -> str:
    return ", ".join(f"{share} %" for share in rollout["steps"])


def _counts(counts: Mapping[str, int]) -> str:
    return f"{counts['answers']}, {counts['failed']} failed, {counts['missed']} missed their objective"


def _steps(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--steps: '{text}' is not a list of percents such as 5,25,100") from None
