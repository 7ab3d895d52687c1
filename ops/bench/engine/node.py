"""The node's loop on a device: an agent process with a real worker on each of up to two devices, two models that take
turns on each, requests by HTTP, and the heartbeats that a control plane gets meanwhile.

A worker's memory holds one of the models. The streams of one model alone are measured beside those of both. Greedy
answers of each, asked for one at a time while the other takes its memory in between, must not change.
"""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from dataplane.protocol.messages import DesiredInstance, DesiredInstances
from ops.bench.engine.agent import KEY, NodeProcess, node_process
from ops.bench.engine.streams import Server, StreamError, compare, prompts_of, run_streams
from ops.profiling.checkpoints import BenchModel, DtypeName, write_tokenizer

DEVICES_MAX = 2
ROUNDS = 3
START_MAX_S = 240.0


def devices_here(device: str) -> int:
    """The devices of that kind that the bench uses."""
    return min(DEVICES_MAX, torch.cuda.device_count()) if torch.device(device).type == "cuda" else 1


def measure_node(
    models: list[BenchModel],
    folder: Path,
    *,
    device: str,
    dtype: DtypeName,
    loads: Sequence[int],
    draws: int,
    prompt_tokens: int,
    max_tokens: int,
) -> dict[str, Any]:
    """The streams of one model and of both, how often answers were repeated in the same tokens, switches, heartbeats.

    Raises:
        RuntimeError: the agent or an instance did not start, or ended; the agent's log is in the folder.
        StreamError: a request failed, or a greedy answer changed.
    """
    for model in models:
        write_tokenizer(model.folder)
    wanted = [
        DesiredInstance(instance_id=f"{model.name}-{slot}", slot=slot, gpus=1, model=model.spec)
        for slot in range(devices_here(device))
        for model in models
    ]
    settings = _settings(models, folder, device=device, dtype=dtype)
    running = node_process(
        DesiredInstances(generation=1, instances=tuple(wanted)),
        settings,
        log=folder / "node.log",
        ready_max_s=START_MAX_S,
    )
    with running as node:
        servers = [_server(node, one) for one in wanted]
        pairs = list(zip(servers[::2], servers[1::2], strict=True))
        repeated = sum(_repeat(*each, max_tokens) for one, two in pairs for each in ((one, two), (two, one)))
        arms = {"one model": [one for one in servers if one.model == models[0].name], "two models": servers}
        rows = compare(
            arms, loads=loads, draws=draws, prompt_tokens=prompt_tokens, max_tokens=max_tokens, temperature=1.0
        )
        beats_s = list(node.control.received_s)
        switches = node.fresh_heartbeat().switches_total
    gaps_s = [after - before for before, after in pairwise(beats_s)]
    return {
        "devices": devices_here(device),
        "streams": rows,
        "greedy_answers_repeated": repeated,
        "switches": switches,
        "heartbeats": len(beats_s),
        "heartbeat_gap_longest_s": max(gaps_s, default=None),
    }


def _settings(models: list[BenchModel], folder: Path, *, device: str, dtype: DtypeName) -> dict[str, str]:
    """Memory for one model and a half, and as much KV. Prefixes are not kept, since they change how a repeated prompt
    is computed, and thereby its rounding.
    """
    memory_bytes = 3 * max(model.weights_bytes for model in models)
    return {
        "GPU_TYPE": "any",
        "DEVICE": device,
        "DTYPE": dtype,
        "SLOTS": msgspec.json.encode([{"gpus": 1, "memory_bytes": memory_bytes}] * devices_here(device)).decode(),
        "ENGINE": "torch",
        "PREFIX_CACHE": "false",
        "CACHE_DIR": str(folder / "node-cache"),
        "CACHE_BYTES": str(2 * sum(model.weights_bytes for model in models) + 2**26),
    }


def _server(node: NodeProcess, instance: DesiredInstance) -> Server:
    name = instance.instance_id
    return Server(api="agent", port=node.port, key=KEY, model=instance.model.name, instance=name)


def _repeat(server: Server, other: Server, max_tokens: int) -> int:
    """Ask for a greedy answer again and again, each time after one of the other model; how often it came again.

    Raises:
        StreamError: it was another one.
    """
    (prompt,) = prompts_of(1, count=1, tokens=64)

    def answer(asked: Server, name: str) -> list[int]:
        sent = run_streams([(asked, prompt)], name=name, max_tokens=max_tokens, temperature=0.0)
        return asyncio.run(sent)[0].tokens

    answers = []
    for number in range(ROUNDS):
        name = f"{server.instance}-{number}"
        answers.append(answer(server, f"greedy-{name}"))
        answer(other, f"between-{name}")
    if any(one != answers[0] for one in answers):
        raise StreamError(f"{server.model}: a greedy answer changed after a switch")
    return ROUNDS - 1
