"""Checks of the machine that the doctor runs on, and the facts they need."""

import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dataplane.protocol.version import tidepool_version
from ops.client.screen import bytes_text
from ops.doctor.finding import Finding, failure, good, warning

PYTHON_MIN = (3, 11)
DISK_BYTES_MIN = 2**30
DISK_SHARE_MIN = 0.05
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder of shared memory, which is only measured
SHARED_MEMORY_BYTES_MIN = 2**30
GPU_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
_GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


@dataclass(frozen=True, kw_only=True)
class Programs:
    """`package`: None where Tidepool is not installed as a package."""

    python: tuple[int, int]
    python_text: str
    package: str | None


@dataclass(frozen=True, kw_only=True)
class Space:
    """Space of the file system of a folder, in bytes."""

    folder: str
    free: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as its driver names it."""

    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """`error`: why the driver's program did not answer; `found` None: the program is not installed."""

    found: tuple[Gpu, ...] | None
    error: str | None = None


def check_python(facts: Programs) -> Finding:
    """Python is new enough."""
    if facts.python < PYTHON_MIN:
        wanted = ".".join(map(str, PYTHON_MIN))
        return failure("python", facts.python_text, f"install Python {wanted} or newer, and Tidepool into it")
    return good("python", facts.python_text)


def check_package(facts: Programs) -> Finding:
    """Which Tidepool this is."""
    if facts.package is None:
        return warning("tidepool", "not installed as a package", "pip install it, so that versions can be compared")
    return good("tidepool", facts.package)


def check_disk(space: Space, what: str) -> Finding:
    """A folder has room: at least a gibibyte and a twentieth of its file system."""
    found = f"{bytes_text(space.free)} of {bytes_text(space.total)} free at {space.folder}"
    todo = f"free some space, or move {space.folder} to a larger disk"
    if space.free < DISK_BYTES_MIN:
        return failure(what, found, f"{todo}: less than {bytes_text(DISK_BYTES_MIN)} is left")
    if space.free < DISK_SHARE_MIN * space.total:
        return warning(what, found, f"{todo}: less than {DISK_SHARE_MIN:.0%} is left")
    return good(what, found)


def check_shared_memory(space: Space | None, *, is_node: bool) -> Finding:
    """A node's agent shares models with its workers through memory files, by default 8 GiB of them."""
    if space is None:
        todo = "mount a tmpfs there, or name another with TIDEPOOL_AGENT_CACHE_DIR"
        return (
            failure("shared memory", f"{SHARED_MEMORY} is absent", todo) if is_node else good("shared memory", "none")
        )
    found = f"{bytes_text(space.free)} of {bytes_text(space.total)} free at {space.folder}"
    if is_node and space.free < SHARED_MEMORY_BYTES_MIN:
        todo = "give the container more (--shm-size, or a volume of medium Memory), or remount it with a larger size="
        return warning("shared memory", found, todo)
    return good("shared memory", found)


def check_gpus(gpus: Gpus, *, is_node: bool) -> Finding:
    """GPUs and their driver. A machine of the control plane needs none."""
    if gpus.error is not None:
        todo = "see `nvidia-smi` and `dmesg`: the driver is broken, or does not fit the kernel"
        return failure("GPUs", gpus.error, todo)
    if gpus.found:
        names = ", ".join(f"{gpu.name} ({bytes_text(gpu.memory_mib * 2**20)})" for gpu in gpus.found)
        return good("GPUs", f"{len(gpus.found)}: {names}; driver {gpus.found[0].driver}")
    if is_node:
        todo = "install the GPU's driver, pass the GPUs into the container, or set TIDEPOOL_AGENT_DEVICE=cpu"
        return warning("GPUs", "none", todo)
    return good("GPUs", "none, and the control plane needs none")


def check_port(address: str, error: str | None, *, what: str, setting: str) -> Finding:
    """A port accepts connections from this machine. `setting`: what names the address."""
    if error is not None:
        todo = (
            f"start it, or open the way to {address} (firewall, NetworkPolicy), or set {setting} where it is elsewhere"
        )
        return failure(what, f"{address}: {error}", todo)
    return good(what, f"{address} accepts connections")


def read_programs() -> Programs:
    """The versions that run here."""
    return Programs(
        python=sys.version_info[:2], python_text=f"Python {platform.python_version()}", package=tidepool_version()
    )


def read_space(folder: Path) -> Space:
    """Space at a folder, or at the nearest one above it that exists."""
    present = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    usage = shutil.disk_usage(present)
    return Space(folder=str(folder), free=usage.free, total=usage.total)


def read_temporary_space() -> Space:
    """Space for temporary files."""
    return read_space(Path(tempfile.gettempdir()))


def read_shared_memory() -> Space | None:
    """Space of shared memory; None: there is none."""
    return read_space(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None


def read_gpus() -> Gpus:
    """The GPUs of NVIDIA's program for its driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Gpus(found=None)
    try:
        done = subprocess.run(
            [program, *_GPU_QUERY], capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(found=None, error=f"nvidia-smi: {error}")
    if done.returncode:
        return Gpus(found=None, error=f"nvidia-smi: {(done.stdout + done.stderr).strip().splitlines()[0:1]}")
    return Gpus(found=parse_gpus(done.stdout))


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """The lines `name, MiB, driver`; memory that the driver does not tell counts as 0."""
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in listed.splitlines() if line.strip()]
    return tuple(
        Gpu(name=name, memory_mib=int(memory) if memory.isdecimal() else 0, driver=driver)
        for name, memory, driver in rows
    )


def connect_error(host: str, port: int) -> str | None:
    """Why a port does not accept a connection; None: it does."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None
