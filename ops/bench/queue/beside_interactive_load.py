"""The load of llm-d-batch-gateway's benchmark (issue 491), what is reported of it there, and rows of both systems."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ops.bench.gateway.isolation import Arrival
from ops.faults.percentiles import percentile

Arm = Literal["alone", "unprotected", "gated"]
ARMS: tuple[Arm, ...] = ("alone", "unprotected", "gated")
REPLICAS = 2
BURST_PER_S, IDLE_PER_S, UNPROTECTED_PER_S = 15.0, 1.0, 4.0
PROMPT_WORDS, ANSWER_TOKENS = 512, 128
LINE_TOKENS, LINE_DEVIATION, LINE_TOKENS_MAX = 500.0, 400.0, 2048
WINDOWS_MIN = (30, 120, 1440)
KV_TOKENS, BATCH_MAX = 131_072, 1024


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """What issue 491 reports of an arm with two replicas: TTFT (p95) in bursts, the share of the lines that were done
    when the interactive load ended, and minutes until all were.
    """

    arm: str
    ttft_p95_s: float
    done: float | None = None
    took_min: float | None = None


THEIRS = (
    Theirs(arm="alone", ttft_p95_s=0.071),
    Theirs(arm="unprotected", ttft_p95_s=0.083),
    Theirs(arm="flow control", ttft_p95_s=3.698, done=0.9),
    Theirs(arm="AIMD", ttft_p95_s=0.092, done=1.0, took_min=12.0),
)
"""From two comments: latencies and shares of September 2026 (ten cycles), minutes of July (AIMD, the same jobs)."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Cycles of two phases of `phase_s` seconds each, and three jobs of `lines` lines."""

    phase_s: float
    cycles: int
    lines: int
    speed: float

    @property
    def seconds(self) -> float:
        return 2 * self.phase_s * self.cycles


@dataclass(frozen=True, kw_only=True)
class Round:
    """One arm of one round, in the replicas' seconds. `done`: the share of the lines that were done when the
    interactive load ended; `took_s`: until all were, None: not within an hour. `bursts`: when each request of a burst
    was sent, and its TTFT; empty where only the quantiles are known.
    """

    arm: Arm
    number: int
    requests: int
    unanswered: int
    burst_p50_s: float
    burst_p95_s: float
    idle_p95_s: float
    done: float | None = None
    took_s: float | None = None
    failed: int = 0
    bursts: tuple[tuple[float, float], ...] = ()


def interactive(load: Load, first: int = 0) -> list[Arrival]:
    """Requests at even distances, a phase of few and one of many in every cycle. Their prompts differ by their numbers,
    from `first` on.
    """
    arrivals: list[Arrival] = []
    for phase in range(2 * load.cycles):
        per_s = BURST_PER_S if phase % 2 else IDLE_PER_S
        arrivals += [
            Arrival(
                at_s=(phase * load.phase_s + number / per_s) / load.speed,
                number=first + len(arrivals) + number,
                words=PROMPT_WORDS,
                tier="priority",
                tokens=ANSWER_TOKENS,
            )
            for number in range(math.floor(load.phase_s * per_s))
        ]
    return arrivals


def is_burst(arrival: Arrival, load: Load) -> bool:
    """Whether a request is one of many."""
    return int(arrival.at_s * load.speed / load.phase_s + 1e-9) % 2 == 1


def line_tokens(count: int, seed: int) -> list[int]:
    """Lengths of answers: log-normal by mean and deviation, and never over the limit."""
    source = random.Random(seed)
    sigma2 = math.log1p((LINE_DEVIATION / LINE_TOKENS) ** 2)
    mu = math.log(LINE_TOKENS) - sigma2 / 2
    return [max(1, min(LINE_TOKENS_MAX, round(source.lognormvariate(mu, math.sqrt(sigma2))))) for _ in range(count)]


def unprotected(load: Load, seed: int, first: int) -> list[Arrival]:
    """Lines of the jobs as interactive requests, as many a second as theirs were, as long as the run lasts."""
    count = min(len(WINDOWS_MIN) * load.lines, math.floor(load.seconds * UNPROTECTED_PER_S))
    lengths = line_tokens(count, seed)
    return [
        Arrival(
            at_s=n / UNPROTECTED_PER_S / load.speed,
            number=first + n,
            words=PROMPT_WORDS,
            tier="priority",
            tokens=tokens,
        )
        for n, tokens in enumerate(lengths)
    ]


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm of both systems. TTFTs are p95 in bursts, `moves`: against alone, `beside`: the same, of those requests
    alone that were sent before the last line was done.
    """

    arm: str
    theirs_p95_s: float | None = None
    theirs_moves: float | None = None
    theirs_done: float | None = None
    theirs_took_min: float | None = None
    ours_p95_s: float | None = None
    ours_moves: float | None = None
    ours_beside: float | None = None
    ours_done: float | None = None
    ours_took_min: float | None = None
    ours_failed: int | None = None


def _beside(round_: Round, alone: Round | None) -> float | None:
    """How far p95 moves for the requests that were sent while lines ran."""
    until_s = math.inf if round_.took_s is None else round_.took_s
    if alone is None or not round_.bursts or not alone.bursts:
        return round_.burst_p95_s / alone.burst_p95_s if alone is not None and (round_.done or 1.0) < 1.0 else None
    mine, others = ([ttft_s for sent_s, ttft_s in each.bursts if sent_s < until_s] for each in (round_, alone))
    return percentile(mine, 0.95) / percentile(others, 0.95) if mine and others else None


def rows(rounds: Sequence[Round]) -> list[Row]:
    """Both columns: medians over the rounds, each held against its own round alone; our gated arm beside their AIMD."""
    alone = {each.number: each for each in rounds if each.arm == "alone"}
    found = []
    for theirs in THEIRS:
        name = "gated" if theirs.arm == "AIMD" else theirs.arm
        mine = [each for each in rounds if each.arm == name]
        took_s = [each.took_s for each in mine if each.took_s is not None]
        done = [each.done for each in mine if each.done is not None]
        moves = [each.burst_p95_s / alone[each.number].burst_p95_s for each in mine if each.number in alone]
        beside = [moved for each in mine if (moved := _beside(each, alone.get(each.number))) is not None]
        found.append(
            Row(
                arm="AIMD; ours: gated" if name == "gated" else name,
                theirs_p95_s=theirs.ttft_p95_s,
                theirs_moves=theirs.ttft_p95_s / THEIRS[0].ttft_p95_s,
                theirs_done=theirs.done,
                theirs_took_min=theirs.took_min,
                ours_p95_s=median(each.burst_p95_s for each in mine) if mine else None,
                ours_moves=median(moves) if moves else None,
                ours_beside=median(beside) if beside and name != "alone" else None,
                ours_done=min(done) if done else None,
                ours_took_min=median(took_s) / 60 if took_s and len(took_s) == len(mine) else None,
                ours_failed=sum(each.failed + each.unanswered for each in mine) if mine else None,
            )
        )
    return found
