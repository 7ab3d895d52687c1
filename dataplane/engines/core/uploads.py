"""How numbers of a step reach the device: in copies that the host does not wait for."""

import numpy as np
import torch

_ALIGNED_BYTES = 16


def upload(device: torch.device, *arrays: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> list[torch.Tensor]:
    """The arrays as tensors on the device, all in one copy. On a CPU they share the arrays' memory.

    The copy comes from pinned memory, which torch's allocator reuses once the device has read it: a copy from other
    memory would make the host wait for all that the device has to do before.
    """
    sources = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return sources
    sizes = [-(-source.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for source in sources]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, source in zip(_parts(host, sizes, sources), sources, strict=True):
        part.copy_(source)
    return _parts(host.to(device, non_blocking=True), sizes, sources)


def _parts(flat: torch.Tensor, sizes: list[int], sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of flat uint8 memory, shaped as the sources are."""
    return [
        part[: source.nbytes].view(source.dtype).view(source.shape)
        for part, source in zip(torch.split(flat, sizes), sources, strict=True)
    ]
