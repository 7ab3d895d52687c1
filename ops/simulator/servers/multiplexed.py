"""The baseline of static multiplexing (MuxServe): each GPU keeps a few models for good, two in the paper's tests.

No GPU ever switches; a model that fits on no GPU is not served. The models of a GPU have time slices by the live slot's
own policy, with switches that take no time. MuxServe runs them concurrently on shares of the GPU's cores: that makes no
step faster that is bound by memory bandwidth, but a prefill of one model can overlap with a decode of another.
"""

from collections.abc import Callable, Iterator, Sequence

from dataplane.engines.replay.engine import ReplaySettings
from dataplane.protocol.messages import ModelSpec
from ops.simulator.kernel.answers import AnswersByModel
from ops.simulator.kernel.events import Events
from ops.simulator.kernel.requests import Served
from ops.simulator.servers.pool import PoolServer


def multiplexed_gpus(
    region: str,
    gpus: int,
    models: Sequence[ModelSpec],
    settings: ReplaySettings,
    *,
    models_max: int,
    events: Events,
    answers: AnswersByModel,
    ended: Callable[[Served], None],
) -> Iterator[PoolServer]:
    """GPUs with `models_max` models at most, each of which goes to the GPU with the fewest that has room for it."""
    placed: list[list[ModelSpec]] = [[] for _ in range(gpus)]
    for model in models:
        free = [
            mine
            for mine in placed
            if len(mine) < models_max
            and sum(one.weights_bytes for one in mine) + model.weights_bytes <= settings.weights_bytes
        ]
        if free:
            min(free, key=len).append(model)
    for number, mine in enumerate(placed):
        if mine:
            yield PoolServer(
                f"{region}/gpu{number}",
                region,
                ["both"],
                mine,
                settings,
                events=events,
                answers=answers,
                ended=ended,
            )
