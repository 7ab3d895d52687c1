"""The engine of a worker process, as its agent configures it. Each engine is imported only where it runs."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.engines.interface import Engine
from dataplane.worker.frames import Configure

if TYPE_CHECKING:
    from dataplane.engines.vllm.settings import VllmEngineSettings


def make_engine(configure: Configure) -> Engine:
    """The engine that an agent asks for.

    Raises:
        ModelLoadError: vLLM is not installed, or its version was not tested.
        DeviceLostError: the ranks of a torch engine do not start.
    """
    if configure.engine == "torch":
        return make_torch_engine(configure)
    if configure.engine == "vllm":
        return make_vllm_engine(configure)
    return make_replay_engine(configure)


def make_replay_engine(configure: Configure) -> Engine:
    """The engine that replays a profile's step times."""
    from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings  # noqa: PLC0415
    from dataplane.scheduling.profile import load_gpu_profile  # noqa: PLC0415

    assert configure.profile is not None, "a replay needs a profile; the agent's settings check that"
    settings = ReplaySettings(
        profile=load_gpu_profile(configure.profile),
        weights_bytes=configure.weights_bytes,
        kv_bytes=configure.kv_bytes,
        host_kv_bytes=configure.host_kv_bytes,
        prefill_tokens_per_step_max=configure.prefill_tokens_max or ReplaySettings.prefill_tokens_per_step_max,
        batch_max=configure.batch_max,
        prefetch=configure.prefetch,
        prefill_only=configure.prefill_only,
        kv_events=configure.kv_events,
        kv_pressure=configure.kv_pressure,
        speed=configure.replay_speed,
        mean_tokens=configure.replay_mean_tokens,
        prefix_cache=configure.prefix_cache,
        turns=configure.turns,
        adapters_bytes=configure.adapters_bytes,
    )
    return ReplayEngine(settings, time.monotonic, time.sleep)


def make_torch_engine(configure: Configure) -> Engine:
    """Our own engine. Its other ranks import torch while this process does."""
    from dataplane.engines.torch.ranks.processes import start_processes  # noqa: PLC0415

    other_ranks = start_processes(configure.ranks - 1) if configure.ranks > 1 else None
    from dataplane.engines.torch.engine import TorchEngine  # noqa: PLC0415
    from dataplane.engines.torch.settings import TorchEngineSettings  # noqa: PLC0415

    return TorchEngine(
        TorchEngineSettings(
            device=configure.device,
            dtype=configure.dtype,
            weights_bytes=configure.weights_bytes,
            kv_bytes=configure.kv_bytes,
            host_kv_bytes=configure.host_kv_bytes,
            host_kv_file=None if configure.host_kv_file is None else Path(configure.host_kv_file),
            slab_bytes=configure.slab_bytes,
            cache_folder=Path(configure.cache_folder),
            cache_bytes=configure.cache_bytes,
            host_wait_max_s=configure.host_wait_max_s,
            prefill_tokens_per_step_max=(
                configure.prefill_tokens_max or TorchEngineSettings.prefill_tokens_per_step_max
            ),
            batch_max=configure.batch_max,
            prefetch=configure.prefetch,
            prefill_only=configure.prefill_only,
            kv_events=configure.kv_events,
            kv_pressure=configure.kv_pressure,
            prefix_cache=configure.prefix_cache,
            turns=configure.turns,
            ranks=configure.ranks,
            adapters_bytes=configure.adapters_bytes,
        ),
        time.monotonic,
        other_ranks=other_ranks,
    )


def make_vllm_engine(configure: Configure) -> Engine:
    """vLLM's engine."""
    prepare_vllm(configure)
    from dataplane.engines.vllm.engine import VllmEngine  # noqa: PLC0415

    return VllmEngine(vllm_settings(configure), time.monotonic)


def prepare_vllm(configure: Configure) -> None:
    """Set the environment of this process, which vLLM reads when it is imported."""
    from dataplane.engines.vllm.interfaces import prepare_process  # noqa: PLC0415

    hosts = 1 if configure.span is None else configure.span.hosts
    prepare_process(configure.device, ranks=configure.ranks // hosts, span=configure.span)


def vllm_settings(configure: Configure) -> "VllmEngineSettings":
    """The settings of vLLM's engine, the same on all hosts of a slot but for `span`."""
    from dataplane.engines.vllm.settings import VllmEngineSettings  # noqa: PLC0415

    assert not configure.prefill_only, "agents run vLLM on workers that do both"
    return VllmEngineSettings(
        device=configure.device,
        dtype=configure.dtype,
        weights_bytes=configure.weights_bytes,
        kv_bytes=configure.kv_bytes,
        models_max=configure.vllm_models_max,
        cache_folder=Path(configure.cache_folder),
        cache_bytes=configure.cache_bytes,
        prefill_tokens_per_step_max=(configure.prefill_tokens_max or VllmEngineSettings.prefill_tokens_per_step_max),
        batch_max=configure.batch_max,
        prefix_cache=configure.prefix_cache,
        spare_to_kv=configure.vllm_models_max == 1,
        async_scheduling=configure.vllm_async_scheduling,
        adapters_max=configure.vllm_adapters_max,
        adapter_rank_max=configure.vllm_adapter_rank_max,
        ranks=configure.ranks,
        turns=replace(configure.turns, mixed_batches=False),  # a step of its own does both, whatever the turn says
        span=configure.span,
    )
