"""What rank 0 tells the other ranks: length-prefixed msgpack over a socket pair. What comes back are `READY`, a
`REPORT` of each transfer that other slots depend on, one of each host copy that is mapped, and one of each adapter, for
which a rank may have no memory.

Every rank's arena, host KV memory and host copies have the same layout, since the parts of a model that the ranks have
are equally large. So a command says where bytes are by a region and an offset in it, and rank 0 alone decides which
memory is used for what.

Rank 0 also decides by what has ended: it uses memory again after it has seen the transfer end that used it. Commands
that use memory therefore say how many submissions of each stream had ended on rank 0 (`passed`): a rank waits for its
own ones before it executes them. Other slots know rank 0 only: a transfer of memory that is shared with them has ended
when all ranks have reported it.
"""

import socket
import struct
from io import BufferedReader
from typing import Literal

import msgspec

from dataplane.engines.torch.model.inputs import ChunkInput, Wanted
from dataplane.protocol.messages import Task

VERSION = 5
"""Increment it when the meaning of a command changes: both ends must be of one version."""
STREAMS = ("weights", "layers", "kv_in", "kv_out")
"""The copy streams of an engine. Commands number them, and the submissions of each, from 0."""
READY = b"."
"""What a rank sends back, once: it has read its first command."""
REPORT = struct.Struct("<BI")
"""What it sends back of a transfer that is `reported`, as soon as that has ended: (stream, number). Of a host copy that
it has mapped: (`HELD`, number). And of an adapter: (`ADAPTED`, 1 if it is served, 0 if there is no memory for it).
"""
ADAPTED = len(STREAMS)
HELD = ADAPTED + 1
ARENA, HOST_KV = "arena", "host_kv"
"""Regions. Others are host copies of models, and files with KV of other slots."""

_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """The first command: the memory of a rank, and where all ranks meet (`store`, a file that they inherited). A rank's
    part of the host KV memory of `host_kv_bytes` is private, or in `host_kv_file`, which rank 0 has made.
    """

    version: int
    rank: int
    ranks: int
    device: str
    dtype: Literal["float32", "bfloat16"]
    arena_bytes: int
    slab_bytes: int
    host_kv_bytes: int
    host_kv_file: str | None
    block_tokens: int
    copy_threads: int
    store: str
    timeout_s: float


class Build(msgspec.Struct, frozen=True, kw_only=True, tag="build"):
    """Build a model without weights."""

    model: int
    folder: str
    task: Task


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """Forget a model, which has no host copy."""

    model: int


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """Map a model's host copy, a file with the parts of all ranks, one after another, and report that by `number`:
    until then the file must stay where it is.
    """

    model: int
    number: int
    file: str


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Release a model's host copy once no transfer reads it."""

    model: int


class Transfer(msgspec.Struct, frozen=True, kw_only=True, tag="transfer"):
    """Submit copies to a stream, as its submission `number`. `copies`: the offset in the region `source`, that in
    `target`, and how many bytes. `after`: submissions, as (stream, number), that must end before. `reported`: whether
    the end is reported.
    """

    stream: int
    number: int
    source: str
    target: str
    copies: tuple[tuple[int, int, int], ...]
    after: tuple[tuple[int, int], ...]
    reported: bool
    passed: tuple[int, ...]


class DropFile(msgspec.Struct, frozen=True, kw_only=True, tag="drop_file"):
    """Unmap a file with KV of another slot, which has ended. No transfer reads it."""

    file: str


class Bind(msgspec.Struct, frozen=True, kw_only=True, tag="bind"):
    """Use a shard of a model at an offset in the arena, as soon as the last transfer to there has ended."""

    model: int
    shard: int
    offset_bytes: int


class Adapt(msgspec.Struct, frozen=True, kw_only=True, tag="adapt"):
    """Serve a LoRA adapter of rank `rank` beside a model, and report whether there is memory for it. `layers`: the
    bytes of the receiver's parts of the factors of each layer, down and up, by its name, in the data type of the slot.
    """

    model: int
    name: str
    rank: int
    layers: dict[str, tuple[bytes, bytes]]


class DropAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="drop_adapter"):
    """Serve an adapter no more, and free its memory."""

    model: int
    name: str


class Forward(msgspec.Struct, frozen=True, kw_only=True, tag="forward"):
    """Run a forward pass. `gated`: before each shard, obey further commands up to its `Gate`."""

    model: int
    wanted: Wanted
    inputs: tuple[ChunkInput, ...]
    gated: bool
    passed: tuple[int, ...]


class Gate(msgspec.Struct, frozen=True, kw_only=True, tag="gate"):
    """Rank 0 has the shard, and goes on."""

    shard: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Rank 0 does not get the next shard: end the forward pass here."""


Command = (
    Setup | Build | Forget | Hold | Release | Transfer | DropFile | Bind | Adapt | DropAdapter | Forward | Gate | Abort
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def model_region(model: int) -> str:
    """The region of a model's host copy."""
    return f"model:{model}"


def file_region(file: str) -> str:
    """The region of a file with KV of another slot."""
    return f"file:{file}"


def region_file(region: str) -> str | None:
    """The file of such a region; None for other regions."""
    return region.removeprefix("file:") if region.startswith("file:") else None


def send_command(connection: socket.socket, command: Command) -> None:
    """Send a command.

    Raises:
        OSError: the other end is gone, or does not read for the timeout of the socket.
    """
    body = _encoder.encode(command)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def read_command(stream: BufferedReader) -> Command | None:
    """The next command; None when rank 0 is gone.

    Raises:
        msgspec.DecodeError: it is none.
    """
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return _decoder.decode(body) if len(body) == length else None
