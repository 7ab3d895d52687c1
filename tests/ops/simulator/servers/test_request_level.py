"""Request-level switching: who waits, who switches, and what a prefetch hides."""

from collections.abc import Mapping, Sequence
from functools import partial

import pytest

from dataplane.protocol.tiers import Objective
from ops.simulator.kernel.answers import answers_by_model
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.events import Events, Kind
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.request_level import RequestLevelCluster, Switching
from tests.ops.simulator.replayed import LATENCY

SWITCH_S = 2.0
WEIGHTS_BYTES = 20


def cluster_times(
    gpus: int,
    requests: Sequence[tuple[float, str]],
    *,
    switching: Switching = "first-come",
    kept: int = 1,
    output_tokens: Mapping[str, int] | None = None,
) -> tuple[list[Served], int]:
    """Those served, by number, and the switches. `output_tokens` by model; a GPU has memory for `kept` models."""
    events = Events()
    ended: list[Served] = []
    models = {
        name: ModelCosts(
            name=name,
            latency=LATENCY,
            weights_bytes=WEIGHTS_BYTES,
            kv_bytes_per_token=1,
            bytes_per_s=WEIGHTS_BYTES / SWITCH_S,
        )
        for name in "abcd"
    }
    cluster = RequestLevelCluster(
        "c",
        "r",
        gpus,
        models,
        InstanceSettings(kv_bytes=10**6),
        gpu_type="g",
        events=events,
        answers=answers_by_model(clairvoyant=True),
        ended=ended.append,
        switching=switching,
        weights_bytes=kept * WEIGHTS_BYTES,
    )

    def come(number: int, model: str) -> None:
        request = Request(
            number=number,
            arrived_s=events.now_s,
            model=model,
            origin="r",
            tier="IW-F",
            prompt_tokens=10,
            output_tokens=(output_tokens or {}).get(model, 100),
        )
        cluster.submit(Served(request=request, target=Objective(ttft_s=10.0, tbt_s=0.1)))

    for number, (arrived_s, model) in enumerate(requests):
        events.at(arrived_s, Kind.ARRIVAL, partial(come, number, model))
    while events.run(1):
        pass
    assert cluster.busy_s <= gpus * events.now_s * (1 + 1e-9)
    return sorted(ended, key=lambda served: served.request.number), cluster.switches


def test_a_gpu_switches_when_nothing_of_its_model_is_left() -> None:
    (first, second, joins), switches = cluster_times(1, [(0.0, "a"), (0.1, "b"), (0.2, "a")])
    assert switches == 2
    assert first.first_s > SWITCH_S
    assert joins.first_s == pytest.approx(first.first_s, abs=0.1)  # its model is coming: it does not wait for "b"
    assert second.first_s > max(first.last_s, joins.last_s) + SWITCH_S


def test_a_model_that_is_there_costs_no_switch() -> None:
    (first, later), switches = cluster_times(2, [(0.0, "a"), (60.0, "a")])
    assert switches == 1
    assert later.ttft_s < first.ttft_s - SWITCH_S * 0.99


@pytest.mark.parametrize(("switching", "first"), [("first-come", "b"), ("shortest-first", "c")])
def test_who_waits_for_an_idle_gpu(switching: Switching, first: str) -> None:
    comes = [(0.0, "a"), (0.1, "b"), (0.2, "c")]
    served, _ = cluster_times(1, comes, switching=switching, output_tokens={"b": 200, "c": 20})
    order = sorted(served, key=lambda one: one.first_s)
    assert [one.request.model for one in order][:2] == ["a", first]


def test_a_line_at_each_gpu_does_not_move_to_an_idle_one() -> None:
    """Of two GPUs one has a short and the other a long answer; who came third stands behind the longer one's."""
    comes = [(0.0, "a"), (0.0, "b"), (0.1, "c"), (0.2, "c")]
    tokens = {"a": 1000, "b": 5}
    in_line, _ = cluster_times(2, comes, switching="line-per-gpu", output_tokens=tokens)
    at_once, _ = cluster_times(2, comes, switching="first-come", output_tokens=tokens)
    assert in_line[2].first_s > in_line[0].last_s
    assert in_line[3].first_s == pytest.approx(in_line[2].first_s, abs=0.1)  # it joins its model's run
    assert at_once[2].first_s < at_once[0].last_s


LONG = {"a": 1000}
"""The answer of "a" takes longer than a switch."""


@pytest.mark.parametrize("switching", ["first-come", "shortest-first", "line-per-gpu"])
def test_the_next_model_is_loaded_while_another_is_served(switching: Switching) -> None:
    comes = [(0.0, "a"), (0.1, "b")]
    (first, second), _ = cluster_times(1, comes, switching=switching, kept=2, output_tokens=LONG)
    (_, waits), _ = cluster_times(1, comes, switching=switching, kept=1, output_tokens=LONG)
    assert first.last_s > 2 * SWITCH_S
    assert waits.first_s - second.first_s == pytest.approx(SWITCH_S)
    assert second.first_s - first.last_s < 0.1


def test_a_prefetch_is_not_free() -> None:
    """The wire carries one model after the other: what the answer before does not hide is waited for."""
    (first, second), _ = cluster_times(1, [(0.0, "a"), (0.1, "b")], kept=2, output_tokens={"a": 5})
    assert SWITCH_S < first.last_s < 1.5 * SWITCH_S
    assert second.first_s > 2 * SWITCH_S


def test_one_gpu_loads_a_model_that_waits() -> None:
    """Both requests of "c" are for the GPU that loads it; the other, idle before, has loaded nothing."""
    comes = [(0.0, "a"), (0.0, "b"), (0.1, "c"), (0.2, "c")]
    served, switches = cluster_times(2, comes, kept=2, output_tokens=LONG)
    assert switches == 3
    assert served[2].first_s == pytest.approx(served[3].first_s, abs=0.1)


def test_a_gpu_keeps_the_models_that_fit() -> None:
    comes = [(0.0, "a"), (20.0, "b"), (40.0, "a"), (60.0, "c"), (80.0, "b")]
    served, _ = cluster_times(1, comes, kept=2)
    loads = [one.ttft_s > SWITCH_S for one in served]
    assert loads == [True, True, False, True, True]  # "b" had been used least recently when "c" came


def test_a_gpu_that_loaded_for_nobody_serves_others() -> None:
    """The second GPU loads "c", but more of "b" comes, and the first serves "c": the second is free for "d"."""
    comes = [(0.0, "a"), (0.0, "b"), (0.1, "c"), (3.0, "b"), (5.0, "b"), (7.0, "b"), (9.0, "b"), (10.0, "d")]
    served, switches = cluster_times(2, comes, kept=2, output_tokens={"a": 600, "b": 300, "c": 2000, "d": 20})
    assert switches == 4
    c, last_b, d = served[2], served[6], served[7]
    assert c.first_s < last_b.last_s < d.first_s < c.last_s
