"""The guarantees of a stack, checked after a fault run. Each finding is a violation, as a sentence."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
from sqlalchemy import create_engine, text

from controlplane.settings import Settings
from ops.faults.injector import children_of
from ops.faults.load import SLO_FIRST_TOKEN_S, Sent, Streamed, Uploaded
from ops.faults.percentiles import percentile
from ops.faults.stack import FaultStack
from ops.local.waiting import wait_until

ENDED = frozenset({"completed", "expired", "cancelled", "failed"})
ENDED_TIMEOUT_S = 300.0
IDLE_TIMEOUT_S = 90.0
FINDINGS_MAX = 20


@dataclass(frozen=True, kw_only=True)
class Attainment:
    """The share of interactive requests of a tier whose first token was in time; failed requests count as late."""

    tier: str
    requests: int
    share: float | None
    first_token_p50_s: float | None
    first_token_p95_s: float | None


def stream_findings(streams: Iterable[Streamed], answers: Mapping[tuple[str, int], Mapping[str, str]]) -> list[str]:
    """Every channel of a complete stream must equal the undisturbed answer's; of a broken one, be a prefix of it."""
    findings = []
    for stream in streams:
        answer = answers[stream.model, stream.prompt]
        who = f"{stream.tier} stream of {stream.model} prompt {stream.prompt} ({stream.outcome} {stream.reason})"
        for channel in sorted(answer.keys() | stream.parts.keys()):
            got, wanted = stream.parts.get(channel, ""), answer.get(channel, "")
            if stream.outcome == "whole" and got != wanted:
                findings.append(f"{who}, {channel}: {difference(got, wanted)}")
            elif not wanted.startswith(got):
                findings.append(f"{who}, {channel}: the text is no prefix of the answer: {difference(got, wanted)}")
    return findings


def difference(got: str, wanted: str) -> str:
    """The first difference of two texts, as a sentence."""
    ours, theirs = got.split(), wanted.split()
    at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"{len(ours)} words for {len(theirs)}"
    return f"word {at} is {ours[at]!r} for {theirs[at]!r}; {len(ours)} words for {len(theirs)}"


def outcomes(streams: Iterable[Streamed]) -> dict[str, int]:
    """How streams ended, with the reason of those that did not end well."""
    counts = Counter(
        stream.outcome if stream.outcome == "whole" else f"{stream.outcome}: {stream.reason}" for stream in streams
    )
    return dict(counts.most_common())


def attainment(streams: Iterable[Streamed]) -> list[Attainment]:
    """Attainment of each interactive tier."""
    listed = list(streams)
    found = []
    for tier, limit_s in SLO_FIRST_TOKEN_S.items():
        mine = [stream for stream in listed if stream.tier == tier]
        firsts = [stream.first_token_s for stream in mine if stream.first_token_s is not None]
        good = sum(
            stream.outcome == "whole" and stream.first_token_s is not None and stream.first_token_s <= limit_s
            for stream in mine
        )
        found.append(
            Attainment(
                tier=tier,
                requests=len(mine),
                share=round(good / len(mine), 4) if mine else None,
                first_token_p50_s=round(percentile(firsts, 0.5), 3) if firsts else None,
                first_token_p95_s=round(percentile(firsts, 0.95), 3) if firsts else None,
            )
        )
    return found


class BatchCheck:
    """Every line of every batch has one result, and the right one."""

    def __init__(self, url: str, key: str, answers: Mapping[tuple[str, int], Mapping[str, str]]) -> None:
        self._answers = answers
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
            trust_env=False,
        )
        self.lines = 0
        self.codes: Counter[str] = Counter()
        self.findings: list[str] = []

    async def run(self, sent: Sent) -> None:
        """Wait until every batch has ended, also those whose upload's answer was lost, and read their files."""
        async with self._http:
            await wait_until(self._all_ended, ENDED_TIMEOUT_S)
            listed = {batch["id"]: batch for batch in await self._listed()}
            self.findings += [
                f"batch {one['id']} is {one['status']} {one['request_counts']} {ENDED_TIMEOUT_S:g} s after the faults"
                for one in listed.values()
                if one["status"] not in ENDED
            ]
            for uploaded in sent.batches:
                await self._check(uploaded, listed.get(uploaded.batch_id))

    async def _all_ended(self) -> bool:
        return all(batch["status"] in ENDED for batch in await self._listed())

    async def _listed(self) -> list[dict[str, Any]]:
        """All batches, with retries."""
        rows: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            answer = await self._get("/v1/batches", {"limit": "100"} | ({"after": after} if after else {}))
            page = answer.json()
            rows += page["data"]
            if not page["has_more"]:
                return rows
            after = page["last_id"]

    async def _get(self, path: str, query: Mapping[str, str] | None = None) -> httpx.Response:
        for attempt in range(20):
            try:
                answer = await self._http.get(path, params=query)
                answer.raise_for_status()
            except httpx.HTTPError:
                if attempt == 19:
                    raise
                await asyncio.sleep(1.0)
            else:
                return answer
        raise AssertionError("the last attempt raises")

    async def _check(self, uploaded: Uploaded, batch: dict[str, Any] | None) -> None:
        if batch is None:
            self.findings.append(f"batch {uploaded.batch_id} was accepted and is missing")
            return
        if batch["status"] not in ENDED:
            return
        if batch["status"] != "completed":
            self.findings.append(f"batch {batch['id']} ended as {batch['status']}: {batch['errors']}")
        lines: list[dict[str, Any]] = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                content = (await self._get(f"/v1/files/{batch[name]}/content")).text
                lines += [json.loads(line) for line in content.splitlines()]
        counts = Counter(line["custom_id"] for line in lines)
        self.lines += len(lines)
        for name in uploaded.lines.keys() | counts.keys():
            if (count := counts[name]) != (name in uploaded.lines):
                self.findings.append(f"batch {batch['id']}: line {name} has {count} results")
        for line in lines:
            self._check_line(batch["id"], line, uploaded.lines.get(line["custom_id"]))

    def _check_line(self, batch_id: str, line: dict[str, Any], asked: tuple[str, int] | None) -> None:
        response = line["response"]
        code = str(response["status_code"]) if response else line["error"]["code"]
        self.codes[code] += 1
        if code != "200" or asked is None:
            return
        for choice in response["body"]["choices"]:
            text = choice["message"]["content"]
            wanted = self._answers[asked].get(f"{choice['index']} content", "")
            if not wanted.startswith(text) or not text:
                wrong = difference(text, wanted)
                self.findings.append(f"batch {batch_id}: line {line['custom_id']} is another answer: {wrong}")


async def leak_findings(stack: FaultStack) -> tuple[list[str], dict[str, Any]]:
    """Leaks of the idle stack: requests and KV on nodes, leases, transactions, connections, processes. Waits for the
    last of them to end.
    """
    held: dict[str, tuple[float, float]] = {}

    async def is_idle() -> bool:
        status = await stack.admin("GET", "/admin/status")
        held["leased batch requests"] = (status["requests_running"], 0)
        held.update(await _on_nodes(stack))
        held.update(await asyncio.to_thread(_in_postgres, stack))
        held.update(_processes(stack))
        return all(value <= limit for value, limit in held.values())

    await wait_until(is_idle, IDLE_TIMEOUT_S)
    findings = [f"{name}: {value:g} (limit {limit:g})" for name, (value, limit) in held.items() if value > limit]
    return findings, {name: value for name, (value, _) in held.items()}


async def _on_nodes(stack: FaultStack) -> dict[str, tuple[float, float]]:
    """Requests in flight and KV in use, over all nodes, by their own metrics."""
    in_flight = kv_bytes = 0.0
    for (_, called), link in stack.links.items():
        if not called.startswith("agent-"):
            continue
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            try:
                metrics = (await client.get(f"http://127.0.0.1:{link.target_port}/metrics")).text
            except httpx.HTTPError:
                in_flight += 1  # a node that does not answer may hold requests
                continue
        for line in metrics.splitlines():
            if line.startswith("tidepool_requests_in_flight{"):
                in_flight += float(line.split()[-1])
            elif line.startswith("tidepool_kv_bytes{") and 'state="used"' in line:
                kv_bytes += float(line.split()[-1])
    return {"requests on nodes": (in_flight, 0), "KV bytes on nodes": (kv_bytes, 0)}


def _in_postgres(stack: FaultStack) -> dict[str, tuple[float, float]]:
    """Long transactions, and connections, whose limit is that of the pools."""
    engine = create_engine(stack.local.database_url)
    questions = {
        "transactions idle for 30 s": "SELECT count(*) FROM pg_stat_activity"
        " WHERE state LIKE 'idle in transaction%' AND state_change < now() - interval '30 s'",
        "Postgres connections": "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'tidepool%'",
    }
    with engine.connect() as connection:
        counts = {name: float(connection.execute(text(query)).scalar_one()) for name, query in questions.items()}
    engine.dispose()
    pools = sum(not name.startswith(("agent-", "beat", "postgres", "valkey")) for name in stack.local.supervisor.pids())
    worker_pools = 1  # Celery's two children have one each
    limits = {"Postgres connections": (pools + worker_pools) * Settings().database_pool_size}
    return {name: (count, limits.get(name, 0)) for name, count in counts.items()}


def _processes(stack: FaultStack) -> dict[str, tuple[float, float]]:
    """Processes of this stack without a supervised ancestor; and the workers of each agent."""
    pids = stack.local.supervisor.pids()
    known: set[int] = set()
    pending = list(pids.values())
    while pending:
        pid = pending.pop()
        known.add(pid)
        pending += children_of(pid)
    strays = [pid for pid in marked(stack.home) if pid not in known and pid != os.getpid()]
    workers = [len(children_of(pid)) for name, pid in pids.items() if name.startswith("agent-")]
    return {"stray processes": (len(strays), 0), "workers of an agent": (max(workers, default=0), 1)}


def marked(home: Path) -> list[int]:
    """Processes whose environment names this home (on Linux)."""
    mark, found = f"TIDEPOOL_HOME={home}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found
