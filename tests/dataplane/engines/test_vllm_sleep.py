"""How a vLLM model leaves its device and returns, on a fake of vLLM's worker."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.engines.vllm import sleep


def make_worker() -> Any:
    """A worker whose model ties two weights, and whose two layers' KV lies in one tensor."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model.append(torch.nn.Linear(4, 2))
    kv = torch.ones(6, 8)
    return SimpleNamespace(
        device=torch.device("cpu"),
        get_model=lambda: model,
        model_runner=SimpleNamespace(kv_caches=[kv[:3], kv[3:]]),
    )


def held_bytes(worker: Any) -> int:
    tensors = [*worker.get_model().parameters(), *worker.model_runner.kv_caches]
    return sum(storage.nbytes() for storage in sleep.storages_of(tensors))


def test_what_left_holds_nothing_and_comes_back_as_it_was() -> None:
    worker = make_worker()
    before, weights = held_bytes(worker), [each.clone() for each in worker.get_model().parameters()]
    sizes = sleep.weight_sizes(worker)
    assert sizes == [64, 32, 8], "what is tied is there once"
    host = torch.empty(sum(sizes), dtype=torch.uint8)
    sleep.copy_weights(worker, host)
    kv_sizes = sleep.offload(worker)
    assert (kv_sizes, held_bytes(worker)) == ([192], 0)
    sleep.restore(worker, host, sizes, kv_sizes)
    assert held_bytes(worker) == before
    for present, expected in zip(worker.get_model().parameters(), weights, strict=True):
        assert torch.equal(present, expected)
    assert not worker.model_runner.kv_caches[1].any()


def test_what_cannot_come_back_whole_stays_away_and_may_come_later() -> None:
    worker = make_worker()
    sizes = sleep.weight_sizes(worker)
    host = torch.empty(sum(sizes), dtype=torch.uint8)
    sleep.copy_weights(worker, host)
    kv_sizes = sleep.offload(worker)
    with pytest.raises(RuntimeError):
        sleep.restore(worker, host, sizes, [2**60])
    assert held_bytes(worker) == 0
    sleep.restore(worker, host, sizes, kv_sizes)
    assert held_bytes(worker) == 104 + 192
