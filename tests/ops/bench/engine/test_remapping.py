"""The benchmark of remapping: what it asks of whom, and one case of it in the engine, on tiny models."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import typer

from dataplane.engines.torch.copies.base import Copy
from ops.bench.engine.remapping import (
    BETWEEN,
    GROUPS,
    WIRES,
    Layer,
    Load,
    asked_of,
    block_slab_bytes,
    choose_cases,
    medians,
    request_kv_bytes,
    serve_case,
)
from ops.bench.engine.virtual_wire import VirtualTime, VirtualWire
from ops.profiling.checkpoints import BenchModel, Shape, build_checkpoints

LOAD = Load(requests=6, tokens=10, kv_requests=2)
TINY = Shape(hidden=64, layers=6, head_dim=16)
LAYER = Layer(size_bytes=2e5, compute_s=1e-4)


def test_every_case_is_there_once_and_overflows_kv() -> None:
    cases = choose_cases(LOAD, None)
    assert {case.group for case in cases} == set(GROUPS)
    rows = Counter((case.group, case.sharing, case.wire, case.way) for case in cases)
    assert set(rows.values()) == {1}
    for case in cases:
        at_once = [each for each in case.asked if not each.after_tokens]
        assert len(at_once) > LOAD.kv_requests
        assert {each.model for each in case.asked} == set(range(case.models))
        assert [each.after_tokens for each in case.asked] == sorted(each.after_tokens for each in case.asked)
        assert case.ratio == (WIRES | BETWEEN)[case.wire]


def test_wires_between_the_papers_and_pcie_5_are_ordered_by_their_ratio() -> None:
    ratios = [WIRES["450 GB/s"], *BETWEEN.values(), WIRES["PCIe 5"], WIRES["PCIe 4"]]
    assert ratios == sorted(ratios)
    assert ratios[0] == pytest.approx(4.44, abs=0.01)


def test_who_is_asked_what() -> None:
    assert Counter(each.model for each in asked_of(LOAD, "spatial")) == {0: 3, 1: 3}
    later = [(each.model, each.phase, each.after_tokens) for each in asked_of(LOAD, "in turn") if each.after_tokens]
    assert later == [(1, "other", 30), (2, "other", 45)]
    singles = [each.after_tokens for each in asked_of(LOAD, "off peak") if each.phase == "off peak"]
    assert singles == [60, 70], "the next one is asked when the one before has all its tokens"


def test_cases_are_chosen_by_what_they_are() -> None:
    (one,) = choose_cases(LOAD, ["ways"], wire=["PCIe 5"], way=["swap"], sharing=["spatial"])
    assert (one.wire, one.way, one.sharing, one.models) == ("PCIe 5", "swap", "spatial", 2)
    with pytest.raises(typer.BadParameter, match="PCIe 9 is none of"):
        choose_cases(LOAD, ["ways"], wire=["PCIe 9"], way=None, sharing=None)
    with pytest.raises(typer.BadParameter, match="none is none of"):
        choose_cases(LOAD, ["none"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[BenchModel]:
    return build_checkpoints(tmp_path_factory.mktemp("models"), [TINY, TINY], "float32")


def test_remapping_decodes_more_at_once_than_refusing(models: list[BenchModel]) -> None:
    kinds = ["remap, not capped", "refuse"]
    cases = choose_cases(LOAD, ["ways"], wire=["450 GB/s"], way=kinds, sharing=["temporal"])
    assert [case.way for case in cases] == kinds
    remap, refuse = (serve_case(models, TINY, LOAD, case, LAYER) for case in cases)
    assert remap.batch == LOAD.requests
    assert refuse.batch <= 2 * LOAD.kv_requests
    assert remap.layers_lent > 0 == refuse.layers_lent
    assert 0 < remap.step_p99_s <= remap.tbt_p99_s
    assert remap.other_ttft_s > 0 == remap.off_peak_tbt_s
    assert medians([remap, replace(remap, batch=1.0), replace(remap, batch=2.0)])["batch"] == 2.0


def test_kv_of_a_request_is_whole_slabs_of_one_block_each() -> None:
    """Of a block of 4 tokens 3,072 bytes; 16 and 10 tokens are seven blocks."""
    assert block_slab_bytes(TINY) == 2**12
    assert request_kv_bytes(TINY, LOAD) == 7 * 2**12


def test_copies_take_the_time_of_the_wire_one_after_another() -> None:
    time = VirtualTime()
    wire = VirtualWire(time, 1000.0)
    source, target = torch.arange(250, dtype=torch.uint8), torch.zeros(250, dtype=torch.uint8)
    began_s = time.now_s()
    events = [wire.submit([Copy(source=source, target=target)]) for _ in range(2)]
    assert target.equal(source)
    assert not events[0].done()
    for event, due_s in ((events[0], 0.25), (events[1], 0.5), (events[0], 0.5)):
        event.wait()
        assert event.done()
        assert time.now_s() - began_s == pytest.approx(due_s, abs=0.1)
