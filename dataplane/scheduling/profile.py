"""GPU profiles: memory, bandwidth and price of a GPU type, and step times by model size. Read from TOML."""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.scheduling.costs import LatencyModel


class ProfileError(ValueError):
    """A profile file is invalid; the message names the file and the key."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Step times of one measured model. `source` names the row of the fits that the coefficients are from."""

    name: str
    source: str
    gpus: int
    weights_bytes: int
    latency: LatencyModel


@dataclass(frozen=True, kw_only=True)
class GpuProfile:
    """One GPU type. `transfer_efficiency` is the share of the PCIe bandwidth that weight transfers reach."""

    gpu_type: str
    memory_bytes: int
    pcie_bytes_per_s: float
    transfer_efficiency: float
    cost_per_hour: float
    models: tuple[ModelProfile, ...]

    def nearest_model(self, weights_bytes: int, gpus: int = 1) -> ModelProfile:
        """The measured model closest in size (by ratio); nothing is scaled. Ties: the first in the file.

        Models measured on `gpus` GPUs together are preferred; without any, all are candidates.
        """
        assert weights_bytes > 0
        candidates = [model for model in self.models if model.gpus == gpus] or list(self.models)
        return min(candidates, key=lambda model: abs(math.log(model.weights_bytes / weights_bytes)))


def load_gpu_profile(path: Path | str) -> GpuProfile:
    """The profile in a TOML file such as those in `ops/profiles`.

    Raises:
        ProfileError: the file does not exist or is not TOML, or a key is missing, unknown or out of range.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{path}: is not TOML: {error}") from error
    table = _Table(str(path), document)
    entries = table.take_list("models")
    profile = GpuProfile(
        gpu_type=table.take_text("gpu_type"),
        memory_bytes=int(table.take_positive("memory_bytes")),
        pcie_bytes_per_s=table.take_positive("pcie_bytes_per_s"),
        transfer_efficiency=table.take_positive("transfer_efficiency", at_most=1.0),
        cost_per_hour=table.take_positive("cost_per_hour"),
        models=tuple(_model(_Table(f"{path}: models[{i}]", entry)) for i, entry in enumerate(entries)),
    )
    table.refuse_rest()
    return profile


_LATENCY_KEYS = tuple(LatencyModel.__dataclass_fields__)


def _model(table: "_Table") -> ModelProfile:
    coefficients = {key: table.take_number(key) for key in _LATENCY_KEYS}
    try:
        latency = LatencyModel(**coefficients)
    except ValueError as error:
        raise ProfileError(f"{table.where}: {error}") from error
    model = ModelProfile(
        name=table.take_text("name"),
        source=table.take_text("source"),
        gpus=int(table.take_positive("gpus")),
        weights_bytes=int(table.take_positive("weights_bytes")),
        latency=latency,
    )
    table.refuse_rest()
    return model


class _Table:
    """A TOML table read key by key, so that every error names its position."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ProfileError(f"{where}: must be a table")
        self.where = where
        self._rest = dict(values)

    def _take(self, key: str) -> Any:
        if key not in self._rest:
            raise ProfileError(f"{self.where}: {key} is missing")
        return self._rest.pop(key)

    def take_text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str) or not value:
            raise ProfileError(f"{self.where}: {key} must be a text, not {value!r}")
        return value

    def take_number(self, key: str) -> float:
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ProfileError(f"{self.where}: {key} must be a number, not {value!r}")
        return value

    def take_positive(self, key: str, *, at_most: float = math.inf) -> float:
        value = self.take_number(key)
        if not 0 < value <= at_most:
            raise ProfileError(f"{self.where}: {key} must be over 0 and at most {at_most:g}, not {value!r}")
        return value

    def take_list(self, key: str) -> list[Any]:
        value = self._take(key)
        if not isinstance(value, list) or not value:
            raise ProfileError(f"{self.where}: {key} must be a list of at least one table")
        return value

    def refuse_rest(self) -> None:
        if self._rest:
            raise ProfileError(f"{self.where}: unknown key {sorted(self._rest)[0]}")
