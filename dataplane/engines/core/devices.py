"""The GPUs that a worker process sees: those of its slot alone, so that none of its threads can use another's."""

from collections.abc import Iterable, Mapping

from dataplane.protocol.errors import ModelLoadError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(indices: Iterable[int], environment: Mapping[str, str]) -> str:
    """The value of CUDA_VISIBLE_DEVICES for a process that may see these of the GPUs that `environment` shows. Names
    such as UUIDs are kept.

    Raises:
        ModelLoadError: `environment` shows fewer.
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        return ",".join(str(index) for index in indices)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    chosen = []
    for index in indices:
        if index >= len(names):
            raise ModelLoadError(f"device cuda:{index} is not among {VISIBLE}={visible}")
        chosen.append(names[index])
    return ",".join(chosen)
