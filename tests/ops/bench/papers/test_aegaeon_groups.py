"""The fleet of models of one and of four GPUs: its traffic by halves, and fleets that are tried until one serves."""

from pathlib import Path

import pytest
import typer

from ops.bench.papers import aegaeon_groups as bench
from ops.bench.papers.aegaeon_fleet import parts_of
from ops.simulator.run import number_of
from ops.simulator.scenario.planning import RegroupPart

ONES, FOURS = parts_of()


def traffic(night: float = 1.0, small: float = 1.0) -> bench.Traffic:
    return bench.Traffic(duration_s=600.0, night=night, small=small, seed=1)


def test_large_models_are_quiet_in_the_first_half_and_small_ones_in_the_second() -> None:
    counts = {(size, half): 0 for size in (1, 4) for half in (0, 1)}
    for one in traffic(night=0.0).requests([ONES, FOURS]):
        size = 1 if number_of(one.model or "") < len(ONES.rates_per_s) else 4
        counts[size, int(one.time_s >= 300)] += 1
    assert counts[1, 1] == counts[4, 0] == 0
    assert min(counts[1, 0], counts[4, 1]) > 50


def test_one_size_alone_has_the_requests_that_it_has_beside_the_other() -> None:
    both = list(traffic().requests([ONES, FOURS]))
    alone = [list(traffic().requests([part])) for part in (ONES, FOURS)]
    assert sorted(alone[0] + alone[1]) == sorted(both)
    assert len(list(traffic(small=3.0).requests([ONES]))) > 2 * len(alone[0])


def test_the_first_fleet_that_keeps_the_attainment_is_the_answer(tmp_path: Path) -> None:
    tries = bench.Tries(traffic(), tmp_path, 0.99)
    row = tries.fewest("fixed", [ONES], iter([[(1,)] * 2, [(1,)] * 3]), None)
    assert (row.gpus, row.layouts, row.large) == (2, "2 x 1", None)
    mixed = tries.fewest("regrouped", [ONES, FOURS], iter([[(4,)] * 3 + [(1,) * 4]]), RegroupPart())
    assert mixed.gpus == 16
    assert mixed.small is not None
    with pytest.raises(typer.BadParameter, match="do not keep it"):
        tries.fewest("none", [ONES], iter([]), None)
