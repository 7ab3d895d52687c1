"""Several gateways route by the same reports, each a second old at most, and by what they have sent themselves since.

python -m ops.bench.planner.stale_reports --draws 3

Instances compute one prompt after another, then decode each for a fixed time; they report once a second, at moments of
their own. Requests of IW-F (1 s) come at random, by any gateway. The policy is the live one; compared are the shortest
of all queues and the shorter of two that are drawn, each with and without what gateways tell each other.
"""

import math
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from controlplane.policies.decisions import Route
from controlplane.policies.facts import Endpoint, InstanceFacts, RoutingFacts
from controlplane.policies.routing import RoutingSettings, choose_route
from dataplane.protocol.tiers import Tier
from ops.client.screen import AsJson, Columns, print_json, print_table, progress_bar
from ops.faults.percentiles import percentile

_DURATION_S = 120.0
_TOKEN_S = 1e-4
_ANSWER_TOKENS, _DECODES_S = 200, 5.0
_TTFT_S = 1.0


class Instance:
    """One instance, its last report and what gateways have sent since: by whom, when, and tokens. A gateway knows its
    own and, `told_s` after they were sent, those of others.
    """

    def __init__(self, number: int, reports_s: float, told_s: float) -> None:
        self.name = f"i{number}"
        self._free_s = 0.0
        self._ends: list[float] = []
        self._reports_s = reports_s
        self._told_s = told_s
        self._sent: list[tuple[int, float, int]] = []
        self._report = self._reported(0.0)

    def seen_by(self, gateway: int, now_s: float) -> InstanceFacts:
        """What a gateway knows."""
        if self._reports_s <= now_s:
            self._report, self._sent = self._reported(now_s), []
            self._reports_s += 1.0
        known = [tokens for by, at_s, tokens in self._sent if by == gateway or at_s + self._told_s <= now_s]
        sent = len(known) * _ANSWER_TOKENS + sum(known)
        return replace(self._report, sent_tokens=sent, sent_input_tokens=sum(known), sent_requests=len(known))

    def serve(self, gateway: int, tokens: int, now_s: float) -> float:
        """Take a prompt of so many tokens; returns the time to its first token."""
        self._sent.append((gateway, now_s, tokens))
        self._free_s = max(self._free_s, now_s) + tokens * _TOKEN_S
        self._ends.append(self._free_s + _DECODES_S)
        return self._free_s - now_s

    def _reported(self, now_s: float) -> InstanceFacts:
        self._ends = [end_s for end_s in self._ends if end_s > now_s]
        wait_s = max(0.0, self._free_s - now_s)
        shares = [min(1.0, (end_s - now_s) / _DECODES_S) for end_s in self._ends]
        return InstanceFacts(
            instance_id=self.name,
            node_id=self.name,
            endpoint=Endpoint(model="m", region="one"),
            gpu_type="any",
            accepting=True,
            age_s=0.0,
            kv_used_bytes=len(self._ends),
            kv_capacity_bytes=1000,
            remaining_tokens=int(wait_s / _TOKEN_S + _ANSWER_TOKENS * sum(shares)),
            requests=len(self._ends),
            prefill_wait_s=wait_s,
            prefill_urgent_wait_s=wait_s,
            prefill_token_s=_TOKEN_S,
        )


def measure(
    gateways: int, instances: int, per_s: float, *, two: bool, told_s: float, seed: int
) -> tuple[float, float, float]:
    """Of one draw: the share of the instances' time that prompts take, that of first tokens that are late, and their
    95th percentile in seconds.
    """
    chance, settings = random.Random(seed), RoutingSettings()
    fleet = [Instance(number, chance.random(), told_s) for number in range(instances)]
    now_s, found, tokens_total = 0.0, [], 0
    while (now_s := now_s + chance.expovariate(per_s)) < _DURATION_S:
        gateway, tokens = chance.randrange(gateways), int(min(6000, chance.lognormvariate(6.7, 0.7)))
        facts = RoutingFacts(
            model="m",
            tier=Tier.IW_F,
            preference=("one",),
            instances=tuple([one.seen_by(gateway, now_s) for one in fleet]),
            ttft_s=_TTFT_S,
            input_tokens=tokens,
            draw=chance.getrandbits(32) if two else None,
        )
        route = choose_route(facts, now_s, settings)
        assert isinstance(route, Route)
        found.append(fleet[int(route.instance_id[1:])].serve(gateway, tokens, now_s))
        tokens_total += tokens
    busy = tokens_total * _TOKEN_S / instances / _DURATION_S
    return busy, fmean(ttft_s > _TTFT_S for ttft_s in found), percentile(sorted(found), 0.95)


COLUMNS: Columns = {
    "gateways": "gateways",
    "requests/s": lambda row: f"{row['requests_per_s']:g}",
    "busy": lambda row: f"{row['busy']:.0%}",
    "shortest of": "queues",
    "others' known": lambda row: "when reported" if row["told_s"] is None else f"after {1000 * row['told_s']:.0f} ms",
    "late": lambda row: f"{row['late']:.1%}",
    "TTFT p95": lambda row: f"{row['ttft_p95_s']:.2f} s",
}


def main(
    gateways: Annotated[list[int] | None, typer.Option(min=1, help="By default 1, 4 and 16.")] = None,
    instances: Annotated[int, typer.Option(min=2)] = 10,
    per_s: Annotated[list[float] | None, typer.Option("--rate", min=0.1, help="Requests/s; by default 50, 65.")] = None,
    draws: Annotated[int, typer.Option(min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """First tokens by how many gateways route by the same reports.

    \b
    Example:
      python -m ops.bench.planner.stale_reports --gateways 8 --rate 60
    """
    cases = [
        (count, rate, two, told_s)
        for count in gateways or [1, 4, 16]
        for rate in per_s or [50, 65]
        for told_s in ((None, 0.15, 0.03) if count > 1 else (None,))
        for two in (False, True)
    ]
    rows: list[dict[str, Any]] = []
    with progress_bar("cases") as report:
        for count, rate, two, told_s in cases:
            report(f"{count} gateways, {rate:g}/s", len(rows), len(cases))
            knows: Any = {"two": two, "told_s": math.inf if told_s is None else told_s}
            runs = [measure(count, instances, rate, **knows, seed=seed) for seed in range(1, draws + 1)]
            busy, late, p95_s = _means(runs)
            named = {"gateways": count, "requests_per_s": rate, "queues": "two" if two else "all", "told_s": told_s}
            rows.append({**named, "busy": busy, "late": late, "ttft_p95_s": p95_s})
    if as_json:
        print_json(rows)
    else:
        print_table(f"Routing by reports of a second ago, {instances} instances, {draws} draws", COLUMNS, rows)


def _means(runs: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    busy, late, p95_s = (fmean(values) for values in zip(*runs, strict=True))
    return busy, late, p95_s


if __name__ == "__main__":
    typer.run(main)
