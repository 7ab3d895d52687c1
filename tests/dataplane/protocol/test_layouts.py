"""Layouts of a node: every way to group eight GPUs, and every step from one to another."""

from collections.abc import Iterator
from itertools import product

import pytest

from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.layouts import (
    Block,
    Layout,
    advanced,
    blocks_between,
    check_layout,
    going_slots,
    memory_like,
    slots_of,
)


def layouts(gpus: int, first: int = 0) -> Iterator[Layout]:
    if first == gpus:
        yield ()
    for size in (1, 2, 4, 8):
        if first % size == 0 and first + size <= gpus:
            yield from ((size, *rest) for rest in layouts(gpus, first + size))


ALL = list(layouts(8))


def test_every_layout_is_reached_and_slots_that_stay_keep_their_number() -> None:
    assert len(ALL) == 26
    for before, after in product(ALL, ALL):
        assert advanced(before, after, ()) == after
        kept = slots_of(before).items() & slots_of(after).items()
        assert going_slots(before, after) == slots_of(before).keys() - dict(kept).keys()


def test_a_block_waits_for_its_own_slots_only() -> None:
    for before, after in product(ALL, ALL):
        for busy in slots_of(before):
            between = advanced(before, after, {busy})
            check_layout(between, 8)
            assert slots_of(between)[busy] == slots_of(before)[busy]
            waiting = [block for block in blocks_between(before, after) if busy in block.going]
            assert list(blocks_between(between, after)) == waiting


def test_blocks_are_the_larger_slots() -> None:
    assert list(blocks_between((4, 1, 1, 2), (1, 1, 1, 1, 4))) == [
        Block(first=0, gpus=4, going=(0,), coming=(0, 1, 2, 3)),
        Block(first=4, gpus=4, going=(4, 5, 6), coming=(4,)),
    ]
    assert list(blocks_between((2, 1, 1), (2, 1, 1))) == []


@pytest.mark.parametrize(
    ("layout", "gpus", "named"),
    [
        ((3, 1), 4, "1, 2, 4, 8, ... GPUs, not 3"),
        ((0, 4), 4, "not 0"),
        ((1, 2, 1), 4, "a slot of 2 GPUs begins at a multiple of 2, not at GPU 1"),
        ((2,), 4, "the slots have 2 GPUs, the node has 4"),
        ((), 4, "the slots have 0 GPUs"),
    ],
)
def test_what_is_no_layout_is_refused(layout: Layout, gpus: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_layout(layout, gpus)


@pytest.mark.parametrize(
    ("slots", "named"),
    [
        ([(1, 1, 0), (2, 2, 1)], "a multiple of 2"),
        ([(2, 2, 0), (2, 2, 1)], "the number of their first GPU"),
        ([(2, 2, None)], "the number of their first GPU"),
        ([(1, 1, 0), (1, 2, 1)], "the same memory_bytes for each GPU"),
        ([], "slots: a node that regroups has at least one"),
    ],
)
def test_a_node_that_regroups_joins_with_a_layout(slots: list[tuple[int, int, int | None]], named: str) -> None:
    specs = tuple(SlotSpec(gpus=gpus, memory_bytes=memory, number=number) for gpus, memory, number in slots)
    with pytest.raises(ValueError, match=named):
        Join(node="n", region="r", gpu_type="g", url="http://n", slots=specs, engine="replay", regroups=True)


def test_slots_of_other_nodes_are_not_numbered() -> None:
    specs = (SlotSpec(gpus=1, memory_bytes=1, number=7),)
    with pytest.raises(ValueError, match="number: only slots of a node that regroups have one"):
        Join(node="n", region="r", gpu_type="g", url="http://n", slots=specs, engine="replay")


@pytest.mark.parametrize("changes", [{"hosts": 0}, {"hosts": 3}, {"hosts": 2, "workers": 2}])
def test_slots_of_several_hosts_have_one_worker_with_equal_numbers_of_gpus(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="hosts must be at least 1, divide gpus, 4, and be 1 for several workers"):
        SlotSpec(gpus=4, memory_bytes=1, **changes)


def test_slots_of_several_hosts_are_not_regrouped() -> None:
    specs = (SlotSpec(gpus=4, memory_bytes=4, number=0, hosts=2),)
    with pytest.raises(ValueError, match="slots of a node that regroups are of one host"):
        Join(node="n", region="r", gpu_type="g", url="http://n", slots=specs, engine="vllm", regroups=True)


def test_slots_have_the_memory_of_their_gpus() -> None:
    assert memory_like(1, of_bytes=403, of_gpus=4) == 100, "whole bytes of a GPU, so that slots fit on it"
    assert memory_like(8, of_bytes=403, of_gpus=4) == 800
    assert memory_like(2, of_bytes=1, of_gpus=4) == 2
