"""How much memory KV has."""

from typing import Any

import pytest

from dataplane.engines.vllm.settings import VllmEngineSettings

GIVEN: dict[str, Any] = {"weights_bytes": 40 * 10**9, "kv_bytes": 40 * 10**9}


def test_kv_of_the_only_model_gets_what_its_weights_leave() -> None:
    alone = VllmEngineSettings(device="cuda:0", spare_to_kv=True, **GIVEN)
    assert alone.pool_bytes(16 * 10**9) == (80 - 8 - 16) * 10**9, "less the tenth that steps need"
    assert alone.pool_bytes(39 * 10**9) == 40 * 10**9, "never less than its share"
    assert VllmEngineSettings(spare_to_kv=True, **GIVEN).pool_bytes(16 * 10**9) == 64 * 10**9
    assert VllmEngineSettings(device="cuda:0", **GIVEN).pool_bytes(16 * 10**9) == 40 * 10**9


def test_models_that_take_turns_share_kv_memory() -> None:
    both = VllmEngineSettings(models_max=4, awake_max=2, **GIVEN)
    assert both.pool_bytes(10**9) == 20 * 10**9
    with pytest.raises(ValueError, match="spare_to_kv needs models_max of 1, got 4"):
        VllmEngineSettings(models_max=4, spare_to_kv=True, **GIVEN)
