"""The messages between an agent and its worker processes: length-prefixed msgpack frames over a socket pair."""

import struct
from io import BufferedReader
from typing import Literal

import msgspec

from dataplane.engines.core.devices import HostSpan
from dataplane.engines.core.kv import KvEvents
from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.interface import EngineOutput, EngineRequest, EngineStats
from dataplane.protocol.messages import EngineKind, ModelSpec
from dataplane.scheduling.schedule import TurnSettings

FRAME_BYTES_MAX = 64 * 2**20
"""A longer frame means that the reader is not at the beginning of a frame."""

LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """Bytes that are no frame: the reader is not at the beginning of one, or the two ends have different versions."""


class Configure(msgspec.Struct, frozen=True, kw_only=True, tag="configure"):
    """First command of a worker: its engine and memory. `profile` is the path of a replay's GPU profile.

    All instances share `kv_bytes`. A `prefill_only` worker makes `host_kv_file`, from which decode workers read its KV,
    as `kv_events` says.
    The workers of a node share the models of `cache_folder`; a load that finds no free space there for
    `host_wait_max_s` fails. `prefill_tokens_max` None: the engine's own. A worker of several `ranks` runs each model in
    as many processes; the sizes, except for that of the cache, are those of one of them. Adapters take up to
    `adapters_bytes` beside the weights; vLLM reserves memory for `vllm_adapters_max` of them. `span`: of a slot whose
    GPUs, and so its ranks, are of several hosts.
    """

    engine: EngineKind
    device: str
    dtype: Literal["float32", "bfloat16"]
    weights_bytes: int
    kv_bytes: int
    host_kv_bytes: int
    host_kv_file: str | None
    slab_bytes: int | None
    cache_folder: str
    cache_bytes: int
    host_wait_max_s: float
    batch_max: int
    prefill_tokens_max: int | None
    prefill_only: bool
    kv_events: KvEvents
    prefetch: bool
    kv_pressure: KvPressure
    prefix_cache: bool
    turns: TurnSettings
    profile: str | None
    replay_speed: float
    replay_mean_tokens: int | None
    vllm_models_max: int
    vllm_async_scheduling: bool
    vllm_adapters_max: int
    vllm_adapter_rank_max: int
    ranks: int
    adapters_bytes: int
    span: HostSpan | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load an instance; answered by Loaded or LoadFailed with the same `serial`, or by Loaded and later LoadFailed.
    Before that LoadStage tells how far it is.
    """

    instance_id: str
    serial: int
    model: ModelSpec
    gpus: int


class Unload(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    """Unload an instance, if it is there; answered by Stats, and during its load also by LoadFailed."""

    instance_id: str


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """Run a request; answered by Outputs, or by Refused."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Drop a request. No answer."""

    request_id: str


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Free the KV of a prefilled request that another worker decodes. No answer."""

    request_id: str


class LoadStage(msgspec.Struct, frozen=True, kw_only=True, tag="load_stage"):
    """A load has `begun`; or it waits for host memory, and will begin anew."""

    instance_id: str
    serial: int
    begun: bool


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The instance takes requests."""

    instance_id: str
    serial: int


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """The instance is not loaded, or no more, and holds no memory."""

    instance_id: str
    serial: int
    error: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The engine did not take a request. The fields are those of a `DataplaneError`."""

    request_id: str
    status: int
    code: str
    message: str
    param: str | None = None


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """The outputs of one step."""

    outputs: tuple[EngineOutput, ...]


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """The statistics of the engine; sent when they changed, at most every 0.25 s, or else every 2 s."""

    stats: EngineStats


Command = Configure | Load | Unload | Add | Cancel | Release
Report = LoadStage | Loaded | LoadFailed | Refused | Outputs | Stats

_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode_frame(frame: Command | Report) -> bytes:
    """A frame with its length before it."""
    body = msgspec.msgpack.encode(frame)
    assert len(body) <= FRAME_BYTES_MAX, f"a frame of {len(body)} bytes; {FRAME_BYTES_MAX} is the limit"
    return LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """The length that a frame's first bytes announce.

    Raises:
        FrameError: it is beyond FRAME_BYTES_MAX.
    """
    (length,) = LENGTH.unpack(head)
    if length > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {length} bytes; {FRAME_BYTES_MAX} is the limit")
    return int(length)


def decode_command(body: bytes) -> Command:
    """The command in a frame's body.

    Raises:
        FrameError: it is none.
    """
    try:
        return _command_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise FrameError(f"{len(body)} bytes are no command: {error}") from error


def decode_report(body: bytes) -> Report:
    """The report in a frame's body.

    Raises:
        FrameError: it is none.
    """
    try:
        return _report_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise FrameError(f"{len(body)} bytes are no report: {error}") from error


def read_command(stream: BufferedReader) -> Command | None:
    """The next command, or None when the other end is gone.

    Raises:
        FrameError: it cannot be read.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    length = body_length(head)
    body = stream.read(length)
    return decode_command(body) if len(body) == length else None
