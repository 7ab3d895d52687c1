"""The demo's shared GPU pool: eight models stream concurrently from one worker with memory for two of them."""

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from rich.table import Table
from rich.text import Text

from ops.local.demo.stage import Answer, Demo, DemoError, ask
from ops.local.sample_fleet import POOL_NODE, POOL_REGION, POOL_RESIDENTS
from ops.local.tiny_models import RECIPES

TOKENS = 32
TIMELINE_COLUMNS = 96
_MARKS = {"decode": ("█", "green"), "prefill": ("▒", "yellow")}
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The result of eight streams. `slot`: the node's state afterwards, `age_s` after the first question;
    `resident_most`: the most models that were in its memory, or being loaded, at any poll.
    """

    answers: Mapping[str, Answer]
    slot: Mapping[str, Any]
    age_s: float
    switches: int
    resident_most: int


def pool(demo: Demo) -> None:
    """Stream from all models at once, show the time slices of each, and check the guarantees of a shared GPU pool."""
    description = f"{len(demo.models)} models stream at once from {POOL_NODE}, whose memory holds {POOL_RESIDENTS}"
    with demo.step("Pool", description):
        seen = _talk_at_once(demo)
        demo.console.print(_answer_table(seen.answers))
        demo.console.print(timeline(seen))
        slabs = ", ".join(f"{count} {state}" for state, count in seen.slot["pool"]["slabs"].items())
        resident = ", ".join(seen.slot["resident_models"])
        demo.console.print(f"   {seen.switches} switches; in memory at the end: {resident}; slabs: {slabs}.")
        check(seen)
        _check_alone(demo, seen)
        demo.console.print(f"   never more than {seen.resident_most} in memory; alone, each gives the same answer.")


def _talk_at_once(demo: Demo) -> Seen:
    node = demo.admin.get(f"/admin/nodes/{POOL_NODE}")
    headers = {"Authorization": f"Bearer {demo.stack.keys['node']}"}
    with (
        httpx.Client(base_url=node["url"], headers=headers) as agent,
        ThreadPoolExecutor(len(demo.models)) as streams,
        demo.progress("streams ended", len(demo.models)) as show,
    ):

        def slot() -> dict[str, Any]:
            only: dict[str, Any] = agent.get("/state").raise_for_status().json()["slots"][0]
            return only

        switches_before = slot()["switches_total"]
        began_s = time.monotonic()
        answers = {model.name: streams.submit(_ask_pool, demo, model.name) for model in demo.models}
        last, resident_most = follow(slot, answers.values(), show)
        age_s = time.monotonic() - began_s
    return Seen(
        answers={name: answer.result() for name, answer in answers.items()},
        slot=last,
        age_s=age_s,
        switches=last["switches_total"] - switches_before,
        resident_most=resident_most,
    )


def follow(
    slot: Callable[[], dict[str, Any]],
    answers: Collection["Future[Answer]"],
    show: Callable[[int], None],
    *,
    patience_s: float = 240.0,
) -> tuple[dict[str, Any], int]:
    """Poll the slot until all answers have ended and nothing of them remains: its last state, and the most models
    that were in its memory. A slot whose worker was replaced has no word of its pool until the next one's first; the
    streams go on meanwhile, and so does this.

    Raises:
        DemoError: that is not so within `patience_s`.
    """
    ends_s, resident_most = time.monotonic() + patience_s, 0
    while True:
        ended = sum(answer.done() for answer in answers)
        now = slot()
        show(ended)
        if now["pool"] is not None:
            resident_most = max(resident_most, len({*now["resident_models"], *now["pool"]["arriving_models"]}))
            if ended == len(answers) and not any(one["remaining_tokens"] for one in now["instances"]):
                return now, resident_most
        if time.monotonic() > ends_s:
            raise DemoError(f"{ended} of {len(answers)} streams on {POOL_NODE} ended within {patience_s:g} s")
        time.sleep(_POLL_S)


def _ask_pool(demo: Demo, model: str) -> Answer:
    return ask(demo.client, model, POOL_REGION.name, max_tokens=TOKENS, to_the_end=True)


def _answer_table(answers: Mapping[str, Answer]) -> Table:
    table = Table("model", "architecture", "first token", "tokens", "tokens/s", "text")
    for name, answer in answers.items():
        table.add_row(
            name,
            RECIPES[name].architecture,
            f"{answer.waited_s * 1000:.0f} ms",
            str(answer.tokens),
            f"{answer.tokens / (answer.ended_s - answer.began_s):.0f}",
            answer.text[:40],
        )
    return table


def timeline(seen: Seen) -> Table:
    """The time slices that the node remembers: a row for each model, time from left to right.

    A worker remembers its own turns: none when it was replaced after the last one.
    """
    turns = [turn for turn in seen.slot["pool"]["turns"] if turn["started_age_s"] < seen.age_s]
    if not turns:
        return Table("the worker was replaced, and its history is lost", box=None)
    oldest_s = max(turn["started_age_s"] for turn in turns)
    span_s = oldest_s - min(turn["ended_age_s"] for turn in turns)
    rows = {name: [""] * TIMELINE_COLUMNS for name in seen.answers}
    for turn in sorted(turns, key=lambda turn: str(turn["kind"])):  # prefills last: they are short, and must show
        first, end = (
            int((oldest_s - turn[edge]) / span_s * TIMELINE_COLUMNS) for edge in ("started_age_s", "ended_age_s")
        )
        first = min(first, TIMELINE_COLUMNS - 1)
        rows[turn["model"]][first : max(first + 1, end)] = [turn["kind"]] * max(1, end - first)
    legend = [part for kind, mark in _MARKS.items() for part in (mark, f" {kind}  ")]
    table = Table(box=None)
    table.add_column(f"{len(turns)} turns")
    table.add_column(Text.assemble(f"{span_s:.1f} s  ", *legend))
    for name, kinds in rows.items():
        table.add_row(name, Text.assemble(*(_MARKS.get(kind, "·") for kind in kinds)))
    return table


def check(seen: Seen) -> None:
    """Check that every stream is complete, by switching, and from memory for two.

    Raises:
        DemoError: a guarantee was violated; the message says which.
    """
    for name, answer in seen.answers.items():
        if answer.tokens != TOKENS or answer.region != POOL_REGION.name:
            raise DemoError(f"{name} generated {answer.tokens} of {TOKENS} tokens in {answer.region}")
    if seen.switches < len(seen.answers):
        raise DemoError(f"{POOL_NODE} switched {seen.switches} times for {len(seen.answers)} models")
    if seen.resident_most > POOL_RESIDENTS:
        raise DemoError(f"{POOL_NODE} held {seen.resident_most} models, and has memory for {POOL_RESIDENTS}")


def _check_alone(demo: Demo, seen: Seen) -> None:
    for name, answer in seen.answers.items():
        if _ask_pool(demo, name).text != answer.text:
            raise DemoError(f"{name} gives another answer when it is asked alone")
