"""What it would be worth to expect answers by model and tenant, not by model alone: the error of the tokens that are
still to come, and late first tokens where queues know as much as they ever could, the true lengths.

ServeGen's clients are the tenants, those whose lengths are known. A tenant's answers are expected by its own last ones
and by `prior` answers that are distributed as the model's.

python -m ops.bench.planner.answer_lengths --data DATA --seed 1 --seed 2 --seed 3
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from msgspec.structs import replace

from dataplane.protocol.answer_lengths import AnswerLengths
from dataplane.protocol.tiers import Tier
from forecasts.importers.lines import DemandFileError, open_csv
from ops.bench.planner.strategies_cases import SCENARIO
from ops.client.screen import AsJson, Columns, print_json, print_table
from ops.simulator.kernel.requests import Request
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import Scenario, load_scenario
from ops.simulator.traffic.rates import Open, draw
from ops.simulator.traffic.senders import Names, Sender, alike
from ops.simulator.traffic.servegen import read_servegen_lengths, servegen_buckets
from ops.simulator.traffic.traffic_parts import RatesPart

PRIORS = (1, 4, 16, 64)
"""Answers of the model's for each tenant."""
CLIENTS, LENGTHS = Path("servegen/m-small_clients.csv.gz"), Path("servegen/m-small_lengths.jsonl.gz")
QUEUE = 20
"""Requests whose errors are summed up, as those of a queue are."""
_DAY_S = 86_400
_MEMORY_ANSWERS = 512
_NO_LIMIT = 2**30
_MODEL, _REGION = "70B", "us-east"

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Which requests: so many for each that ServeGen recorded on a day, in its first hours."""

    day: int
    hours: float
    scale: float
    seed: int


class Recent:
    """The last answers of a tenant, or of all."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_MEMORY_ANSWERS)
        self._array: IntArray | None = None

    def note(self, tokens: int) -> None:
        self._lengths.append(tokens)
        self._array = None

    def beyond(self, made: int) -> tuple[int, int, int]:
        """How many there are, how many of them are longer than `made`, and their tokens beyond it."""
        if self._array is None:
            self._array = np.fromiter(self._lengths, np.int64)
        longer = self._array[self._array > made]
        return len(self._array), len(longer), int(longer.sum()) - made * len(longer)


def expected(own: Recent, everyone: Recent, prior: int, made: int) -> float | None:
    """The tokens still to come of a tenant's answer that has `made`; None where nobody's is known to go on."""
    _, longer, tokens = own.beyond(made)
    known, longer_of_all, tokens_of_all = everyone.beyond(made)
    count = longer + prior * longer_of_all / max(1, known)
    return (tokens + prior * tokens_of_all / max(1, known)) / count if count else None


def requests(data: Path, drawn: Draw, *, known: bool = True) -> Iterator[Request]:
    """ServeGen's requests, with the client in the place of the origin. `known`: only of clients with known lengths;
    those of the others are the scenario format's.

    Raises:
        DemandFileError: a file cannot be read.
    """
    since_s = drawn.day * _DAY_S
    part = RatesPart(
        kind="servegen",
        path=data / CLIENTS,
        lengths=data / LENGTHS,
        scale=drawn.scale,
        from_s=since_s,
        until_s=since_s + 3600 * drawn.hours,
    )
    with open_csv(part.path) as file:
        clients = list(dict.fromkeys(line.word("client_chunk") for line in file.lines(("client_chunk",))))
    named = frozenset(read_servegen_lengths(data / LENGTHS))
    sender = Sender(models=alike([_MODEL]), origins=alike(clients), tiers={Tier.IW_F: 1.0})
    with open_csv(part.path) as file:
        buckets = servegen_buckets(file, Open(part=part, sender=sender, names=Names([_MODEL])))
        yield from (one for one in draw(buckets, part, drawn.seed) if not known or one.origin in named)


def errors(drawn: Iterable[Request], seed: int) -> dict[str, Any]:
    """Errors of expected tokens to come by the model's answers (the live function) and by tenant with each prior: when
    a request comes, and while its answer is made, at a moment of it (so long ones weigh more); relative to the tokens.
    """
    rng = np.random.default_rng(seed)
    lengths, everyone = AnswerLengths(), Recent()
    tenants: defaultdict[str, Recent] = defaultdict(Recent)
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    truth: list[tuple[int, int]] = []
    for request in drawn:
        own, tokens = tenants[request.origin], request.output_tokens
        moments = (0, int(rng.integers(tokens)))
        truth.append((tokens, tokens - moments[1]))
        live = [float(lengths.rest(made, _NO_LIMIT)) for made in moments]
        found["model"].append((live[0], live[1]))
        for prior in PRIORS:
            ours = [expected(own, everyone, prior, made) for made in moments]
            come, making = (ahead if one is None else one for one, ahead in zip(ours, live, strict=True))
            found[f"tenant, {prior}"].append((come, making))
        for each in (lengths, own, everyone):
            each.note(tokens)
    true = np.array(truth, float)
    return {
        "requests": len(truth),
        "tenants": len(tenants),
        "error": {name: error_of(np.array(pairs), true) for name, pairs in found.items()},
    }


def error_of(said: npt.NDArray[np.float64], true: npt.NDArray[np.float64]) -> dict[str, float]:
    """Mean absolute errors over mean tokens. `said`, `true`: shape (requests, 2), at arrival and while it is made."""
    off, tokens = said - true, true[:, 0]
    whole = len(off) // QUEUE * QUEUE
    queues, queued = (each[:whole, 0].reshape(-1, QUEUE).sum(axis=1) for each in (off, true))
    return {
        "coming": float(np.abs(off[:, 0]).mean() / true[:, 0].mean()),
        "made": float(np.average(np.abs(off[:, 1]), weights=tokens) / np.average(true[:, 1], weights=tokens)),
        "queue": float(np.abs(queues).mean() / queued.mean()),
    }


def late(drawn: Sequence[Request], instances: int, seed: int) -> dict[str, float]:
    """The share of late first tokens on a fixed fleet, where queues count what answers of the model were, and where
    they know every length.
    """
    here = [replace(one, number=number, origin=_REGION) for number, one in enumerate(drawn)]
    return {
        name: simulate(_fixed(instances, clairvoyant), seed=seed, traffic=here).result.tiers[0].ttft_violations
        for name, clairvoyant in (("model", False), ("true", True))
    }


def _fixed(instances: int, clairvoyant: bool) -> Scenario:
    """The scenario of the comparison of strategies in one region, without scaling, served as by default."""
    whole = load_scenario(SCENARIO).model_dump(exclude={"scaling", "provisioning", "planning"})
    changes = {
        "regions": [_REGION],
        "latencies_ms": {},
        "traffic": whole["traffic"] | {"origins": {_REGION: 1.0}},
        "fleet": whole["fleet"]
        | {"nodes": [], "instances": [{"model": _MODEL, "region": _REGION, "count": instances}]},
        "policy": {"clairvoyant": clairvoyant},
    }
    return Scenario.model_validate(whole | changes)


COLUMNS: Columns = {
    "expected by": "expected_by",
    "error as it comes": lambda row: f"{row['coming']:.0%}",
    "while it is made": lambda row: f"{row['made']:.0%}",
    f"of {QUEUE} together": lambda row: f"{row['queue']:.0%}",
}
LATE: Columns = {
    "of the model": lambda row: f"{row['model']:.2%}",
    "true lengths": lambda row: f"{row['true']:.2%}",
}


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recordings.", file_okay=False, exists=True)],
    seed: Annotated[list[int] | None, typer.Option(min=0, help="By default 1.")] = None,
    day: Annotated[int, typer.Option(min=0, max=13, help="Of the recording.")] = 9,
    hours: Annotated[float, typer.Option(min=0.1, max=24)] = 24.0,
    scale: Annotated[float, typer.Option(help="Requests for each that was recorded.")] = 0.0005,
    queue_hours: Annotated[float, typer.Option(min=0, max=24, help="Simulated; 0: nothing.")] = 2.0,
    queue_scale: Annotated[float, typer.Option(help="The same there, of all clients.")] = 0.003,
    instances: Annotated[int, typer.Option(min=1, help="That serve them.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Compare what is expected of answers by model and by tenant, and what true lengths would change for first tokens.

    \b
    Example:
      python -m ops.bench.planner.answer_lengths --data DATA --seed 1 --seed 2 --seed 3
    """
    found, waits = [], []
    try:
        for each in seed or [1]:
            found.append(errors(requests(data, Draw(day=day, hours=hours, scale=scale, seed=each)), each))
            if queue_hours:
                some = Draw(day=day, hours=queue_hours, scale=queue_scale, seed=each)
                waits.append(late(list(requests(data, some, known=False)), instances, each))
    except DemandFileError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json({"errors": found, "late": waits})
        return
    rows = [
        {"expected_by": name, **{kind: fmean(one["error"][name][kind] for one in found) for kind in error}}
        for name, error in found[0]["error"].items()
    ]
    print_table("Mean absolute error of tokens to come, over their mean; means over seeds", COLUMNS, rows)
    if waits:
        print_table("Late first tokens by what queues know of answers, a row for each seed", LATE, waits)


if __name__ == "__main__":
    typer.run(main)
