"""The vLLM engine behind a node's agent, against plain vLLM: its own server, in a process of its own.

Both serve the same checkpoint with the same data type and KV memory, to the same client, which sends both the same
prompts at temperature 1.0, in alternating order; the one that is not asked has nothing to do. All else of the rival is
its default, but that a CPU compiles nothing on either side. It is the server that `vllm serve` starts, by its module,
since that command asks for a distribution named vllm, which its builds for CPUs are not.
"""

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dataplane.protocol.messages import DesiredInstance, DesiredInstances
from ops.bench.engine.agent import KEY, node_process
from ops.bench.engine.streams import Server, compare
from ops.bench.gateway.stack import served_by
from ops.local.ports import free_port
from ops.profiling.checkpoints import BenchModel, DtypeName, write_tokenizer

RIVAL, OURS = "vllm serve", "tidepool"
START_MAX_S = 600.0
TEMPERATURE = 1.0
_ROOT = Path(__file__).parents[3]
_GPU_SHARE = 0.3
"""Of the GPU's memory, which the rival checks that it is free: the KV memory is given in bytes."""


class MissingVllmError(Exception):
    """There is no environment with vLLM."""


@dataclass(frozen=True, kw_only=True)
class VllmSetup:
    """What both run. `python`: an interpreter with vLLM and Tidepool's dependencies. `folder`: for logs and caches."""

    python: Path
    device: str
    dtype: DtypeName
    kv_bytes: int
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of both: the same threads, no network, and vLLM's settings of a CPU as Tidepool sets them."""
        return {
            "PYTHONPATH": str(_ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_PLUGINS": "",
        }


def check_vllm(python: Path) -> str:
    """vLLM's version in the environment of an interpreter.

    Raises:
        MissingVllmError: there is none that Tidepool was tested with.
    """
    ask = "from dataplane.engines.vllm.version import *; check_version(); print(installed_version())"
    try:
        found = subprocess.run([python, "-c", ask], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=True)
    except FileNotFoundError as error:
        raise MissingVllmError(f"there is no {python}: `make gpu` or `make test-vllm` installs vLLM") from error
    except subprocess.CalledProcessError as error:
        raise MissingVllmError(error.stderr.strip().rpartition("\n")[2]) from error
    return found.stdout.strip()


@contextlib.contextmanager
def rival(model: BenchModel, setup: VllmSetup) -> Iterator[Server]:
    """vLLM's own server."""
    port = free_port()
    options = {
        "--model": str(model.folder),
        "--served-model-name": model.name,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--api-key": KEY,
        "--dtype": setup.dtype,
        "--kv-cache-memory-bytes": str(setup.kv_bytes),
        "--gpu-memory-utilization": str(_GPU_SHARE),
    }
    flags = ["--enforce-eager"] if setup.device == "cpu" else []
    command = [str(setup.python), "-m", "vllm.entrypoints.openai.api_server", *_flat(options), *flags]
    log = setup.folder / "vllm-serve.log"
    with served_by(command, port, core=None, environment=setup.environment, log=log, start_max_s=START_MAX_S):
        yield Server(api="openai", port=port, key=KEY, model=model.name)


def _flat(options: Mapping[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


@contextlib.contextmanager
def ours(model: BenchModel, setup: VllmSetup) -> Iterator[Server]:
    """An agent whose worker has the vLLM engine. What weights leave of their memory goes to its KV, too."""
    weights_bytes = model.weights_bytes + model.weights_bytes // 8 + 2**26
    memory_bytes = weights_bytes + setup.kv_bytes
    settings = {
        "GPU_TYPE": "any",
        "DEVICE": setup.device,
        "DTYPE": setup.dtype,
        "SLOTS": msgspec.json.encode([{"gpus": 1, "memory_bytes": memory_bytes}]).decode(),
        "KV_SHARE": str(setup.kv_bytes / memory_bytes),
        "ENGINE": "vllm",
        "CACHE_DIR": str(setup.folder / "vllm-cache"),
    }
    wanted = DesiredInstances(
        generation=1,
        instances=(DesiredInstance(instance_id=model.name, slot=0, gpus=1, model=model.spec),),
    )
    with node_process(
        wanted,
        settings,
        python=str(setup.python),
        environment=setup.environment,
        log=setup.folder / "vllm-agent.log",
        ready_max_s=START_MAX_S,
    ) as node:
        yield Server(api="agent", port=node.port, key=KEY, model=model.name, instance=model.name)


STARTS = {OURS: ours, RIVAL: rival}


def measure_vllm(
    model: BenchModel, setup: VllmSetup, *, loads: Sequence[int], draws: int, prompt_tokens: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Medians of both by the number of simultaneous streams. They start one after the other, since vLLM does not start
    where another process frees memory meanwhile.

    Raises:
        MissingVllmError: there is no vLLM.
        RuntimeError: a server did not start; its log is in the setup's folder.
        StreamError: a request failed.
    """
    check_vllm(setup.python)
    write_tokenizer(model.folder)
    with contextlib.ExitStack() as running:
        servers = {name: [running.enter_context(start(model, setup))] for name, start in STARTS.items()}
        return compare(
            servers,
            loads=loads,
            draws=draws,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            temperature=TEMPERATURE,
        )
