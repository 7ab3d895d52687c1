"""The prefix cache of the torch engine: a conversation's tenth turn with it and without, and its cost to requests that
share nothing.

Each round asks both engines alike, in alternation, with tokens that no round before had. The tenth turn's first token
is timed on the wall. Requests that share nothing are measured in CPU time of the whole process, copies to host memory
included, and outgrow the KV memory several times, so that blocks are evicted all the time.
"""

import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated

import torch
import typer

from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.tiers import Tier
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.profiling.checkpoints import VOCABULARY, BenchModel, build_checkpoints, parameters_of, shape_of
from ops.profiling.figures import Figure, interleaved, medians

TURNS = 10
SAID_TOKENS, ANSWER_TOKENS = 400, 44
"""Of each turn but the last: 3,996 tokens before that."""
LAST_TOKENS = 48
SINGLE_REQUESTS, SINGLE_TOKENS, SINGLE_ANSWER_TOKENS = 48, 160, 24
SPEEDUP_MIN = 10.0
OVERHEAD_MAX = 1.05


@dataclass
class Bench:
    """One engine with the cache and one without, of the same model. Both draw the same tokens in the same order."""

    model: BenchModel
    prefix_cache: bool
    kv_bytes: int
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    made: list[tuple[int, ...]] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = count()
        settings = TorchEngineSettings(
            weights_bytes=self.model.weights_bytes + self.model.weights_bytes // 4,
            kv_bytes=self.kv_bytes,
            host_kv_bytes=self.kv_bytes,
            prefix_cache=self.prefix_cache,
        )
        self.engine = TorchEngine(settings, time.monotonic)
        self.engine.load(self.model.name, self.model.spec)

    def close(self) -> None:
        self.engine.close()

    def tokens(self, number: int) -> tuple[int, ...]:
        return tuple(self.chance.choices(range(VOCABULARY), k=number))

    def ask(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[list[tuple[int, ...]], float]:
        """The answers to prompts that are asked at once, and the seconds until the first token."""
        ids = [f"r{next(self._numbers)}" for _ in prompts]
        answers: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
        began_s, first_s = time.perf_counter(), 0.0
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.engine.add(
                EngineRequest(
                    request_id=request_id,
                    instance_id=self.model.name,
                    tier=Tier.IW_N,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                )
            )
        while self.engine.has_work():
            for output in self.engine.step():
                first_s = first_s or time.perf_counter() - began_s
                answers[output.request_id] += output.token_ids
        return list(answers.values()), first_s

    def last_turn_s(self) -> float:
        """Seconds to the first token of a conversation's last turn. What was said before is drawn by chance. With a
        cache, each turn is asked; without one, the last turn computes everything in any case.
        """
        said: tuple[int, ...] = ()
        for _ in range(TURNS - 1):
            said += self.tokens(SAID_TOKENS + ANSWER_TOKENS)
            if self.prefix_cache:
                self.ask([said], 1)
        (answer,), first_s = self.ask([(*said, *self.tokens(LAST_TOKENS))], 8)
        self.made.append(answer)
        return first_s

    def single_cpu_s(self) -> float:
        """CPU seconds of requests that share nothing."""
        began_s = time.process_time()
        answers, _ = self.ask([self.tokens(SINGLE_TOKENS) for _ in range(SINGLE_REQUESTS)], SINGLE_ANSWER_TOKENS)
        self.made += answers
        return time.process_time() - began_s


def measure_prefix_cache(model: BenchModel, *, rounds: int) -> list[Figure]:
    """Both figures.

    Raises:
        AssertionError: an answer with the cache differs from that without.
    """
    conversation_bytes = 2 * _kv_bytes(model, 4096)
    with (
        closing(Bench(model, prefix_cache=True, kv_bytes=conversation_bytes)) as cached,
        closing(Bench(model, prefix_cache=False, kv_bytes=conversation_bytes)) as plain,
    ):
        runs = {"cached": cached.last_turn_s, "plain": plain.last_turn_s}
        turn_s = medians(interleaved(runs, rounds=rounds))
        assert cached.made == plain.made, "the cache changed a token"
    single_bytes = _kv_bytes(model, SINGLE_REQUESTS * (SINGLE_TOKENS + SINGLE_ANSWER_TOKENS))
    with (
        closing(Bench(model, prefix_cache=True, kv_bytes=single_bytes)) as cached,
        closing(Bench(model, prefix_cache=False, kv_bytes=single_bytes)) as plain,
    ):
        runs = {"cached": cached.single_cpu_s, "plain": plain.single_cpu_s}
        single_s = medians(interleaved(runs, rounds=rounds))
        assert cached.made == plain.made, "the cache changed a token"
    return [
        Figure(
            name=f"first token of turn {TURNS}, without the cache against with it",
            value=turn_s["plain"] / turn_s["cached"],
            unit="x",
            bound="at least",
            target=SPEEDUP_MIN,
            details={"plain_s": turn_s["plain"], "cached_s": turn_s["cached"]},
        ),
        Figure(
            name="CPU time of requests that share nothing, with the cache against without",
            value=single_s["cached"] / single_s["plain"],
            unit="x",
            bound="at most",
            target=OVERHEAD_MAX,
            details={"plain_s": single_s["plain"], "cached_s": single_s["cached"]},
        ),
    ]


def _kv_bytes(model: BenchModel, tokens: int) -> int:
    engine = TorchEngine(TorchEngineSettings(weights_bytes=2 * model.weights_bytes, kv_bytes=2**26), time.monotonic)
    with closing(engine):
        engine.load(model.name, model.spec)
        return tokens * 2**26 // engine.stats().instances[0].kv_tokens_max


def main(
    parameters: Annotated[str, typer.Option(help="Of the model, such as 10M or 90M.")] = "10M",
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, of which the median is shown.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of the CPU.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure the prefix cache on a CPU: turn 10 of a conversation, and requests that share nothing.

    \b
    Example:
      python -m ops.bench.engine.prefix_cache --rounds 3
    """
    try:
        size = parameters_of(parameters)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    torch.set_num_threads(threads)
    with work_folder() as folder:
        notes().print(f"{parameters} parameters, float32, {rounds} rounds", markup=False)
        model = build_checkpoints(folder, [shape_of(size)], "float32")[0]
        figures = measure_prefix_cache(model, rounds=rounds)
    rows = [
        {
            "name": one.name,
            "value": one.value,
            "unit": one.unit,
            "bound": one.bound,
            "target": one.target,
            **one.details,
        }
        for one in figures
    ]
    if as_json:
        print_json({"parameters": parameters, "rounds": rounds, "threads": threads, "figures": rows})
        return
    columns: Columns = {
        "figure": "name",
        "value": lambda row: f"{row['value']:.3g}{row['unit']}",
        "target": lambda row: f"{row['bound']} {row['target']:g}{row['unit']}",
        "without, s": lambda row: f"{row['plain_s']:.3g}",
        "with, s": lambda row: f"{row['cached_s']:.3g}",
    }
    print_table("prefix cache of the torch engine", columns, rows)


if __name__ == "__main__":
    typer.run(main)
