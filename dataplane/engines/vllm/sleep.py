"""A model leaves its device and returns: functions that run in vLLM's worker, on the storages of its tensors.

Weights are copied once, as vLLM laid them out; offloading then only frees their storages. KV is freed too: vLLM
preempts its requests before, and prefills their tokens again. Buffers stay, because models of a process share some of
them. Restored storages may have other addresses: no CUDA graph may contain the old ones.

Tested on CPU. On CUDA it should do the same, and has not been tried.
"""

from collections.abc import Iterable
from typing import Any

import torch

from dataplane.engines.vllm.interfaces import kv_tensors


def copy_weights(worker: Any, host: torch.Tensor) -> None:
    """Write the weights, one after the other, to `host`, flat uint8 of the sum of `weight_sizes`."""
    start = 0
    for storage in _weights(worker):
        end = start + storage.nbytes()
        host[start:end].copy_(_bytes_of(storage))
        start = end


def offload(worker: Any) -> list[int]:
    """Free weights and KV; returns the sizes of the KV's storages for `restore`."""
    _synchronize(worker)
    kv_sizes = [storage.nbytes() for storage in storages_of(kv_tensors(worker))]
    for storage in (*_weights(worker), *storages_of(kv_tensors(worker))):
        storage.resize_(0)
    return kv_sizes


def restore(worker: Any, host: torch.Tensor, weight_sizes: list[int], kv_sizes: list[int]) -> None:
    """Undo `offload`: weights are copied from `host`, KV is empty. If memory is too small, all is freed again."""
    start = 0
    try:
        for storage, size in zip(_weights(worker), weight_sizes, strict=True):
            storage.resize_(size)
            _bytes_of(storage).copy_(host[start : start + size], non_blocking=True)
            start += size
        for storage, size in zip(storages_of(kv_tensors(worker)), kv_sizes, strict=True):
            storage.resize_(size)
            _bytes_of(storage).zero_()
    except Exception:
        offload(worker)
        raise
    _synchronize(worker)


def weight_sizes(worker: Any) -> list[int]:
    """The sizes of the weights' storages, in their order."""
    return [storage.nbytes() for storage in _weights(worker)]


def _weights(worker: Any) -> list[torch.UntypedStorage]:
    return storages_of(parameter.data for parameter in worker.get_model().parameters())


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages under tensors, each once, in a stable order: a storage keeps its identity when it is resized."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return list({storage._cdata: storage for storage in storages}.values())  # noqa: SLF001


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(worker: Any) -> None:
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
