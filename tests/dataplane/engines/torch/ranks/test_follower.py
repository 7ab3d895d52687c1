"""A rank waits for its own transfers where rank 0 has seen its own end."""

import pytest

from dataplane.engines.torch.copies.base import Copy
from dataplane.engines.torch.ranks.commands import VERSION, Setup
from dataplane.engines.torch.ranks.follower import Follower, Submissions
from dataplane.memory.events import TransferError
from tests.dataplane.engines.torch.ranks.test_leader import ManualStream


def submissions(count: int) -> tuple[Submissions, ManualStream]:
    stream = ManualStream()
    made = Submissions(stream)
    nothing: list[Copy] = []
    for _ in range(count):
        made.submit(nothing, [])
    return made, stream


def test_it_waits_for_the_last_of_the_submissions_that_have_ended_there() -> None:
    made, stream = submissions(3)
    assert made.before(0) == []
    assert made.before(2) == [stream.events[1]]
    stream.events[0].finish()
    assert made.before(1) == []
    stream.events[1].finish()
    assert made.before(2) == []
    assert made.before(3) == [stream.events[2]]


def test_a_failed_submission_is_noticed() -> None:
    made, stream = submissions(1)
    stream.events[0].finish(OSError("no device"))
    with pytest.raises(TransferError, match="no device"):
        made.before(1)


def test_a_rank_of_another_version_is_refused() -> None:
    setup = Setup(
        version=VERSION + 1,
        rank=1,
        ranks=2,
        device="cpu",
        dtype="float32",
        arena_bytes=256,
        slab_bytes=256,
        host_kv_bytes=0,
        host_kv_file=None,
        block_tokens=8,
        copy_threads=1,
        store="",
        timeout_s=1.0,
    )
    with pytest.raises(ValueError, match=f"version must be {VERSION}, as this rank's, got {VERSION + 1}"):
        Follower(setup, lambda: None, lambda _: None)
