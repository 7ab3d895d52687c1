"""vLLM's ranks on a host that is not the head of its slot: they load their parts of a model, and do what the head's
engine says, which vLLM sends them itself.
"""

from collections.abc import Callable
from pathlib import Path

from dataplane.engines.vllm import interfaces
from dataplane.engines.vllm.runner import engine_arguments, stored_bytes
from dataplane.engines.vllm.settings import VllmEngineSettings
from dataplane.engines.vllm.version import check_version
from dataplane.protocol.errors import DeviceLostError
from dataplane.protocol.messages import ModelSpec


def run_ranks(spec: ModelSpec, settings: VllmEngineSettings, loaded: Callable[[], None]) -> None:
    """Run this host's ranks of a model until one of them ends. The arguments are those that the head's engine computes;
    `loaded` is called when the ranks of all hosts have loaded their parts.

    Raises:
        ModelLoadError: vLLM is not installed, or the checkpoint cannot be read or split.
        DeviceLostError: a rank of this host has ended.
    """
    check_version()
    folder = Path(spec.path)
    kv_bytes = settings.pool_bytes(-(-stored_bytes(folder, settings.dtype) // settings.ranks))
    executor = interfaces.start_ranks(engine_arguments(spec.name, folder, settings, spec.task, kv_bytes))
    loaded()
    interfaces.wait_for_ranks(executor)
    raise DeviceLostError(f"a rank of {spec.name} has ended")
