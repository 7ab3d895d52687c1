"""KV that is handed over, while it is transferred, to a slot that lends it the place of the next model: no token shows
it.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dataplane.engines.core.remapping.settings import RemapSettings
from tests.dataplane.engines.torch.deep import QUICK, Deep, Undisturbed, loaded, slot, wants
from tests.dataplane.engines.torch.handing import Handing, Streams

NAMES = ("llama", "qwen2", "gemma3_text")


@pytest.mark.parametrize("layers_too", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_kv_comes_while_it_is_transferred_to_the_place_of_the_next_model(
    deep: Deep, undisturbed: Undisturbed, tmp_path: Path, seed: int, *, layers_too: bool
) -> None:
    """Of three models, to a slot with memory for two, by transfers that are late, reordered and failing."""
    asked, chance, lent = wants(NAMES, 5), random.Random(seed), Counter[bool]()
    first = slot(deep, NAMES, models_there=2, prefill_only=True, host_kv_file=tmp_path / "kv", kv_pressure="swap")
    remap = RemapSettings(capped=False, settle_s=0.0, spare_layers=0.0, share_max=0.9 if layers_too else 0.0)
    second = slot(deep, NAMES, models_there=2, remap=remap, turns=replace(QUICK, time_slices="deadlines"))
    prefiller = loaded(deep, NAMES, first, Streams(f"{seed} first").make)
    decoder = loaded(deep, NAMES, second, Streams(f"{seed} second").make)
    handing = Handing(wanted={one.request_id: one for one in asked}, decoder=decoder, release=prefiller.release)
    joining = list(asked)
    chance.shuffle(joining)
    while joining or not handing.over or prefiller.has_work():
        for _ in range(min(chance.randrange(3), len(joining))):
            prefiller.add(joining.pop())
        handing.prefilled(prefiller.step())
        prefiller.check()
        handing.decode()
        decoder.check()
        lent[decoder.arena.kv_from < decoder.arena.weights_slabs] += 1
    assert handing.gathered.tokens == undisturbed(asked)
    assert handing.announced
    assert lent[True]
    decoder.close()
    prefiller.close()
