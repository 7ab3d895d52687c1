"""The kept copy of a decoding batch's KV is what its blocks have, whatever joins, leaves, or is replaced."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.batch_kv import BatchKv
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.deep import Ticks
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.slots import SLAB_BYTES, slot_for_one
from tests.dataplane.engines.torch.tiny import VOCABULARY, spec_of

Checkpoint = Callable[[str], Path]
LAYERS, BLOCK_TOKENS, PER_SLAB = 3, 4, 5
TOKEN_BYTES = 2 * LAYERS * 2 * 8 * 4


def arena() -> torch.Tensor:
    return torch.randn(8, PER_SLAB, LAYERS, 2, BLOCK_TOKENS, 2, 8, generator=torch.Generator().manual_seed(0))


def check(copies: BatchKv, cache: torch.Tensor, lists: list[list[int]], cached: list[int]) -> list[int]:
    """Arrange a batch, and compare each row with its blocks."""
    arranged = copies.arrange(cache, lists, cached)
    assert arranged is not None
    assert sorted(arranged) == list(range(len(lists)))
    rows = copies.rows(len(lists), max(cached) // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS)
    for row, blocks, tokens in zip(arranged, lists, cached, strict=True):
        there = torch.cat([cache[block // PER_SLAB, block % PER_SLAB] for block in blocks], dim=2)
        assert torch.equal(rows[row][:, :, :tokens], there[:, :, :tokens])
        assert rows[row].isfinite().all(), "masked keys and values are multiplied by zero, and must be numbers"
    return arranged


def test_a_row_stays_until_its_sequence_has_other_blocks() -> None:
    copies, cache = BatchKv(), arena()
    a, b, c = [3, 17, 9], [30, 2], [11, 12, 13]
    rows = check(copies, cache, [a, b, c], [9, 5, 10])
    copies.written()
    before = copies.rows(3, 1).clone()
    cache += 1  # what is copied anew differs now
    assert copies.arrange(cache, [c, a, b], [11, 10, 6]) == [rows[2], rows[0], rows[1]]
    assert torch.equal(copies.rows(3, 1), before)
    check(copies, cache, [list(a), list(b), list(c)], [10, 6, 11])


def test_the_last_rows_fill_those_that_are_free() -> None:
    copies, cache = BatchKv(), arena()
    lists = [[block] for block in range(6)]
    check(copies, cache, lists, [3] * 6)
    assert check(copies, cache, [lists[1], lists[5], lists[2]], [3] * 3) == [1, 0, 2]
    check(copies, cache, lists[::-1], [3] * 6)


def test_a_row_is_filled_where_a_step_without_it_wrote_a_token() -> None:
    copies, cache, blocks = BatchKv(), arena(), [3, 4]
    check(copies, cache, [blocks], [5])
    cache[0, 4, :, :, 1] = 7.0
    check(copies, cache, [blocks], [6])


def test_numbers_of_an_earlier_sequence_do_not_stay_behind_a_shorter_one() -> None:
    copies, cache = BatchKv(), arena()
    cache[0] = float("nan")
    copies.arrange(cache, [[1, 2, 3]], [12])
    check(copies, cache, [[7], [8, 9, 10]], [2, 11])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_that_is_too_large_has_no_copy(rows: int) -> None:
    copies, cache = BatchKv(rows * 8 * TOKEN_BYTES), arena()
    blocks = [[2 * row, 2 * row + 1] for row in range(rows + 1)]
    check(copies, cache, blocks[:rows], [7] * rows)
    assert copies.arrange(cache, blocks, [7] * (rows + 1)) is None
    assert copies.arrange(cache, [[1, 2, 3], *blocks[1:rows]], [8] * rows) is None
    check(copies, cache, blocks[:rows], [7] * rows)


def test_random_batches_are_copied() -> None:
    chance, copies, cache = random.Random(0), BatchKv(6 * 30 * TOKEN_BYTES), arena()
    free, held = list(range(8 * PER_SLAB)), list[tuple[list[int], int]]()
    for _ in range(300):
        gone = [one for one in held if one[1] == 24 or chance.random() < 0.1]
        free += [block for blocks, _ in gone for block in blocks]
        held = [one for one in held if one not in gone]
        while len(held) < 6 and chance.random() < 0.6:
            chance.shuffle(free)
            held.append(([free.pop() for _ in range(6)], chance.randrange(20)))
        if not held:
            continue
        chance.shuffle(held)
        lists, tokens = [blocks for blocks, _ in held], [count for _, count in held]
        arranged = check(copies, cache, lists, tokens)
        if chance.random() < 0.8:  # a step runs
            for row, blocks, at in zip(arranged, lists, tokens, strict=True):
                slab, index = divmod(blocks[at // BLOCK_TOKENS], PER_SLAB)
                cache[slab, index, :, :, at % BLOCK_TOKENS] = copies.rows(6, 30)[row][:, :, at] = chance.random()
            copies.written()
            held = [(blocks, count + 1) for blocks, count in held]


@pytest.mark.parametrize("bytes_max", [2**28, 2**14], ids=["all", "small"])
@pytest.mark.parametrize("slabs", [3, 40])
def test_logits_are_those_without_a_copy(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, slabs: int, bytes_max: int
) -> None:
    """Two models take turns, on memory in which their requests are swapped, and on enough. Where they are swapped,
    batches differ from run to run, and their sums are rounded otherwise.
    """
    names = ["llama", "gemma2"]
    used: list[bool] = []
    rows = BatchKv.arrange

    def arrange(*given: Any) -> list[int] | None:
        arranged = rows(*given)
        used.append(arranged is not None)
        return arranged

    def logits_of(copies: BatchKv | None) -> dict[tuple[str, int], torch.Tensor]:
        made: dict[tuple[str, int], torch.Tensor] = {}

        def watch(sequence: TokenSequence, logits: torch.Tensor) -> None:
            made[sequence.request.request_id, len(sequence.tokens)] = logits.clone()

        memory = {"kv_bytes": slabs * SLAB_BYTES, "host_kv_bytes": 2**21, "block_tokens": BLOCK_TOKENS}
        turns = TurnSettings(decode=DecodeSettings(quota_min_s=0.01, quota_max_s=0.02))
        engine = TorchEngine(slot_for_one(map(checkpoint, names), turns=turns, **memory), Ticks(), watch=watch)
        engine._steps._batch_kv = copies
        for name in names:
            engine.load(name, spec_of(name, checkpoint(name)))
        chance = random.Random(1)
        for number in range(12):
            prompt = [chance.randrange(3, VOCABULARY) for _ in range(chance.randrange(1, 12))]
            engine.add(request(str(number), prompt, instance_id=names[number % 2], max_tokens=chance.randrange(1, 25)))
        assert drain(engine).errors == {}
        assert (engine.stats().extra["swapped_out"] > 0) == (slabs == 3)
        engine.close()
        return made

    monkeypatch.setattr(BatchKv, "arrange", arrange)
    copied = logits_of(BatchKv(bytes_max))
    assert set(used) == ({True} if bytes_max == 2**28 else {True, False})
    expected = logits_of(None)
    assert copied.keys() == expected.keys()
    for key, logits in copied.items():
        torch.testing.assert_close(logits, expected[key], rtol=0, atol=1e-3 if slabs == 3 else 0)


def test_a_slot_of_a_cpu_keeps_a_copy_until_a_model_is_forgotten(checkpoint: Checkpoint) -> None:
    engine = TorchEngine(slot_for_one([checkpoint("llama")], kv_bytes=2**18), Ticks())
    engine.load("a", spec_of("any", checkpoint("llama")))
    engine.add(request("0", range(3, 9), max_tokens=4))
    drain(engine)
    kept = engine._steps._batch_kv
    assert kept is not None
    assert kept._held
    engine.unload("a")
    assert engine._steps._batch_kv is not kept
    engine.close()
