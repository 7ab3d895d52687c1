"""Which rows and columns each rank has."""

import torch

from dataplane.engines.torch.model.split import Segment, Split


def parts(split: Split, rank: int) -> list[int]:
    """The rows of a rank in order: -1 for padding."""
    size = sum(segment.share for segment in split.segments)
    rows = torch.full((size,), -1)
    for cut in split.cuts(rank):
        rows[cut.at : cut.at + cut.count] = torch.arange(cut.start, cut.start + cut.count)
    return rows.tolist()


def test_rows_are_divided_in_order() -> None:
    split = Split(dim=0, segments=(Segment(size=6, shares=3),), ranks=3)
    assert [parts(split, rank) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert split.size == 6


def test_the_last_share_of_a_vocabulary_is_padded_and_may_be_empty() -> None:
    split = Split(dim=0, segments=(Segment(size=5, shares=4),), ranks=4)
    assert [parts(split, rank) for rank in range(4)] == [[0, 1], [2, 3], [4, -1], [-1, -1]]


def test_neighbouring_ranks_have_the_same_kv_heads() -> None:
    split = Split(dim=0, segments=(Segment(size=4, shares=2),), ranks=4)
    assert [parts(split, rank) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_rank_has_a_share_of_each_fused_weight() -> None:
    queries, kv = Segment(size=4, shares=2), Segment(size=2, shares=1)
    split = Split(dim=0, segments=(queries, kv, kv), ranks=2)
    assert [parts(split, rank) for rank in range(2)] == [[0, 1, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7]]
    assert split.size == 8
