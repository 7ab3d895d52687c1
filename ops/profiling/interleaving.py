"""All models on one engine that holds one at a time, compared with their references.

Tokens are the criterion: each must be the reference's, except for ties, which are counted. Logits are reported, and
must keep two bounds that a correct engine keeps despite rounding:

- at tokens without a near tie of a router, there or before, no logit differs by more than the tolerance, or by
  more than a few times the difference of transformers from itself; several ranks round the sums of each layer
  once more, so that theirs may also differ by as much as the data type makes transformers differ from float32;
- over all tokens, the median difference is no more than that. Rounding that chooses another expert changes single
  tokens by any amount, and those after them by less; a wrong computation changes most of them.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.tiers import Tier
from ops.profiling.figures import Progress
from ops.profiling.reference import Continuation, Reference

JOIN_EVERY_STEPS = 3
LEAVE_AFTER_TOKENS = 2
TICK_S = 0.001
"""The engine's clock advances by this much whenever it is read, so that a quota has as many steps on any machine."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Two tokens are nearly tied if the reference's logits of them differ by no more than this share of its largest."""
ROUTER_TOLERANCES = {"float32": 1e-5, "bfloat16": 0.01}
"""Two experts are nearly tied if the reference's probabilities of them differ by no more than this."""
SPREADS_MAX = 4.0
"""Logits may differ by the tolerance, or by so many times the difference of transformers from itself."""


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """`prompts` per model, at most `tokens` generated from each; at least `switches` if there are several models.
    `ranks`: processes that run each model together.
    """

    device: str
    dtype: Literal["float32", "bfloat16"]
    switches: int
    prompts: int
    tokens: int
    seed: int = 0
    ranks: int = 1

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    @property
    def router_tolerance(self) -> float:
        return ROUTER_TOLERANCES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class LogitShares:
    """Differences of logits as shares of a token's largest logit: the largest of all, the largest at tokens without a
    near tie of a router up to there (0 without such tokens), and the median of all.
    """

    most: float
    settled: float
    median: float


def logit_shares(shares: Sequence[float], settled: Sequence[bool]) -> LogitShares:
    """The shares of tokens with these differences; `settled`: without a near tie up to there."""
    return LogitShares(
        most=max(shares, default=0.0),
        settled=max((share for share, is_settled in zip(shares, settled, strict=True) if is_settled), default=0.0),
        median=statistics.median(shares) if shares else 0.0,
    )


@dataclass(kw_only=True)
class ModelFinding:
    """The result of one model. `tokens`: how many were compared; `ties`: how many of them differed within the
    tolerance; `router_ties`: how many others differed at a near tie of experts; `logit_difference`: the largest one;
    `logits`: differences from the reference; `spread`: differences of transformers from itself; `rounding`: from itself
    in float32, where that is a bound.
    """

    model: str
    architecture: str
    prompts: int
    prompt_tokens_max: int
    window_tokens: int | None
    spread: LogitShares
    rounding: LogitShares
    tokens: int = 0
    ties: int = 0
    router_ties: int = 0
    logit_difference: float = 0.0
    logits: LogitShares = LogitShares(most=0.0, settled=0.0, median=0.0)
    switches: int = 0
    mismatches: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The results. `left`: requests that were cancelled; `resident_max`: models that were in the arena at once."""

    settings: CheckSettings
    models: tuple[ModelFinding, ...]
    switches: int
    preemptions: int
    swapped_out: int
    swapped_in: int
    recomputed: int
    left: int
    resident_max: int

    @property
    def failed(self) -> tuple[str, ...]:
        """The models whose tokens or logits are not those of transformers."""
        return tuple(finding.model for finding in self.models if finding.mismatches)


@dataclass(kw_only=True)
class InflightRequest:
    """A request under comparison: `at` tokens of its reference are generated so far. `leaves`: it is cancelled."""

    model: str
    expected: Continuation
    leaves: bool
    at: int = 0


class Interleaving:
    """Runs the models of `references` on one engine and compares. Close `engine` afterwards."""

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        references: dict[str, Reference],
        engine: TorchEngineSettings,
        settings: CheckSettings,
    ) -> None:
        self._settings = settings
        self._references = references
        self._findings = {name: self._finding(name, reference) for name, reference in references.items()}
        self._shares: dict[str, list[tuple[float, bool]]] = {name: [] for name in references}
        self._chance = random.Random(settings.seed)
        self._in_flight: dict[str, InflightRequest] = {}
        self._ticks = 0
        self._left = 0
        self._resident_max = 0
        self._running_model: str | None = None
        self.engine = TorchEngine(engine, self._clock, watch=self._watch)
        for spec in specs:
            self.engine.load(spec.name, spec)

    def run(self, report: Progress) -> CheckReport:
        """Run all prompts of all models, in rounds until there were enough switches."""
        wanted = self._settings.switches if len(self._findings) > 1 else 0
        rounds = 0
        while rounds == 0 or self.engine.stats().switches_total < wanted:
            self._round(rounds, lambda: report("models alternate", self.engine.stats().switches_total, wanted))
            rounds += 1
        for finding in self._findings.values():
            self._check_logits(finding)
        stats = self.engine.stats()
        return CheckReport(
            settings=self._settings,
            models=tuple(self._findings.values()),
            switches=stats.switches_total,
            preemptions=int(stats.extra["preemptions"]),
            swapped_out=int(stats.extra["swapped_out"]),
            swapped_in=int(stats.extra["swapped_in"]),
            recomputed=int(stats.extra["recomputed"]),
            left=self._left,
            resident_max=self._resident_max,
        )

    def _round(self, number: int, report: Callable[[], None]) -> None:
        """Every prompt of every model once, and one of each that is cancelled, in random order."""
        joining = []
        for model, reference in self._references.items():
            wanted = [*reference.continuations, self._chance.choice(reference.continuations)]
            for index, expected in enumerate(wanted):
                inflight = InflightRequest(model=model, expected=expected, leaves=index == len(wanted) - 1)
                joining.append((f"{model}/{number}/{index}", inflight))
        self._chance.shuffle(joining)
        steps = 0
        while joining or self.engine.has_work():
            if joining and (steps % JOIN_EVERY_STEPS == 0 or not self._in_flight):
                self._join(*joining.pop())
            for output in self.engine.step():
                self._take(output)
            self._note_models()
            report()
            steps += 1

    def _join(self, request_id: str, inflight: InflightRequest) -> None:
        self._in_flight[request_id] = inflight
        request = EngineRequest(
            request_id=request_id,
            instance_id=inflight.model,
            tier=Tier.IW_N,
            prompt=inflight.expected.prompt,
            generated=inflight.expected.tokens[: inflight.at],
            max_tokens=self._settings.tokens,
        )
        self.engine.add(request)

    def _take(self, output: EngineOutput) -> None:
        inflight = self._in_flight.get(output.request_id)
        if inflight is None:
            return
        ended = output.error is not None or output.finish_reason is not None
        if output.error is not None:
            self._findings[inflight.model].mismatches.append(output.error)
        tokens: list[int | None] = [*output.token_ids, *([None] if output.finish_reason == "stop" else [])]
        same = all(self._same(output.request_id, inflight, token) for token in tokens)
        if ended or not same:
            del self._in_flight[output.request_id]
        elif inflight.leaves and inflight.at >= LEAVE_AFTER_TOKENS:
            del self._in_flight[output.request_id]
            self.engine.cancel(output.request_id)
            self._left += 1

    def _same(self, request_id: str, inflight: InflightRequest, token: int | None) -> bool:
        """Whether the next token is the reference's; None is an end of sequence. If not, the request is cancelled, and
        after a tie another one continues from the reference's token.
        """
        expected, finding = inflight.expected, self._findings[inflight.model]
        eos_ids = self._references[inflight.model].eos_ids
        right = expected.tokens[inflight.at]
        finding.tokens += 1
        inflight.at += 1
        if token == right or (token is None and right in eos_ids):
            return True
        self.engine.cancel(request_id)
        chosen = [token] if token is not None else sorted(eos_ids)
        gap = min(expected.gap(inflight.at - 1, candidate) for candidate in chosen)
        tied = gap <= self._settings.tolerance
        if tied or expected.margins[inflight.at - 1] <= self._settings.router_tolerance:
            finding.ties += tied
            finding.router_ties += not tied
            if inflight.at < len(expected.tokens):
                self._join(f"{request_id}+{inflight.at}", inflight)
        else:
            shown = "the end" if token is None else token
            where = f"prompt of {len(expected.prompt)} tokens, token {inflight.at}"
            finding.mismatches.append(f"{where}: {shown} instead of {right}, {gap:.2g} of the largest logit apart")
        return False

    def _watch(self, sequence: TokenSequence, logits: torch.Tensor) -> None:
        inflight = self._in_flight[sequence.request.request_id]
        finding = self._findings[inflight.model]
        difference, share = inflight.expected.distance(sequence.generated, logits)
        finding.logit_difference = max(finding.logit_difference, difference)
        self._shares[inflight.model].append((share, self._is_settled(inflight.expected, sequence.generated)))

    def _is_settled(self, expected: Continuation, index: int) -> bool:
        least = min(expected.margins[index], expected.margins_before[index])
        return least > self._settings.router_tolerance

    def _check_logits(self, finding: ModelFinding) -> None:
        shares = self._shares[finding.model]
        finding.logits = logit_shares([share for share, _ in shares], [settled for _, settled in shares])
        bounds = {
            name: max(
                self._settings.tolerance, SPREADS_MAX * getattr(finding.spread, name), getattr(finding.rounding, name)
            )
            for name in ("settled", "median")
        }
        if not finding.logits.settled <= bounds["settled"]:
            share = f"{finding.logits.settled:.2g} of the largest"
            finding.mismatches.append(f"a logit differs by {share} where no router nearly ties")
        if not finding.logits.median <= bounds["median"]:
            finding.mismatches.append(f"logits differ by {finding.logits.median:.2g} of the largest in the median")

    def _note_models(self) -> None:
        stats = self.engine.stats()
        self._resident_max = max(self._resident_max, len(stats.resident_models))
        running = None if stats.pool is None else stats.pool.running_model
        if running is not None and running != self._running_model:
            self._findings[running].switches += 1
            self._running_model = running

    def _clock(self) -> float:
        self._ticks += 1
        return self._ticks * TICK_S

    def _finding(self, name: str, reference: Reference) -> ModelFinding:
        settled = [
            self._is_settled(expected, index)
            for expected in reference.continuations
            for index in range(len(expected.tokens))
        ]
        return ModelFinding(
            model=name,
            architecture=reference.architecture,
            prompts=len(reference.continuations),
            prompt_tokens_max=max(len(expected.prompt) for expected in reference.continuations),
            window_tokens=reference.window_tokens,
            spread=logit_shares(reference.spreads, settled),
            rounding=logit_shares(reference.roundings or [0.0] * len(settled), settled),
        )
