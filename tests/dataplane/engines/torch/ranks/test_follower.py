"""A rank waits for its own transfers where rank 0 has seen its own end, and answers it meanwhile."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dataplane.engines.torch.copies.base import Copy
from dataplane.engines.torch.ranks import follower
from dataplane.engines.torch.ranks.commands import (
    ADAPTED,
    ARENA,
    HOST_KV,
    REPORT,
    STREAMS,
    VERSION,
    Adapt,
    Build,
    Command,
    Setup,
    Transfer,
)
from dataplane.engines.torch.ranks.follower import Follower, Submissions
from dataplane.memory.events import TransferError
from tests.dataplane.engines.torch.ranks.test_leader import ManualStream

SETUP = Setup(
    version=VERSION,
    rank=0,
    ranks=1,
    device="cpu",
    dtype="float32",
    arena_bytes=256,
    slab_bytes=256,
    host_kv_bytes=256,
    host_kv_file=None,
    block_tokens=8,
    copy_threads=1,
    store="",
    timeout_s=10.0,
)


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
    setup = msgspec.structs.replace(SETUP, version=VERSION + 1)
    with pytest.raises(ValueError, match=f"version must be {VERSION}, as this rank's, got {VERSION + 1}"):
        Follower(setup, lambda: None, lambda _: None)


def test_an_adapter_is_answered_for_while_a_transfer_is_under_way(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = {name: ManualStream() for name in STREAMS}
    monkeypatch.setattr(follower, "make_stream", lambda _, name, *, threads: streams[name])
    kv_out = STREAMS.index("kv_out")
    transfer = Transfer(
        stream=kv_out,
        number=0,
        source=ARENA,
        target=HOST_KV,
        copies=((0, 0, 64),),
        after=(),
        reported=True,
        passed=(0,) * len(STREAMS),
    )
    build = Build(model=1, folder=str(checkpoint("llama")), task="generate")
    commands: list[Command] = [build, transfer, Adapt(model=1, name="one", rank=4, layers={})]
    sent: list[bytes] = []
    rank = Follower(
        msgspec.structs.replace(SETUP, store=str(tmp_path / "store")),
        lambda: commands.pop(0) if commands else None,
        sent.append,
    )
    rank.run()
    answered = list(sent)
    streams["kv_out"].events[0].finish()
    rank.close()
    assert answered == [REPORT.pack(ADAPTED, 1)]
    assert sent[1:] == [REPORT.pack(kv_out, 0)]
