"""The messages between an agent and its template processes: length-prefixed msgpack frames over a socket pair."""

import struct
from typing import Any, Literal

import msgspec

LENGTH = struct.Struct("<I")


class Render(msgspec.Struct, frozen=True, kw_only=True, tag="render"):
    """Render a template with these variables, JSON values; answered by Rendered or Failed."""

    source: str
    variables: dict[str, Any]


class Compile(msgspec.Struct, frozen=True, kw_only=True, tag="compile"):
    """Compile a template; answered by Compiled or Failed."""

    source: str


class Rendered(msgspec.Struct, frozen=True, kw_only=True, tag="rendered"):
    """The text of a template."""

    text: str


class Compiled(msgspec.Struct, frozen=True, kw_only=True, tag="compiled"):
    """The template is valid. `variables`: the names that it reads and does not define."""

    variables: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """No text. `refused`: the template refuses this conversation by `raise_exception`; `broke`: it failed with these
    variables; `limit`: it needs more memory or makes more text than allowed; `invalid`: it is no template.
    """

    kind: Literal["refused", "broke", "limit", "invalid"]
    message: str


Command = Render | Compile
Reply = Rendered | Compiled | Failed

_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode_frame(frame: Command | Reply) -> bytes:
    """A frame with its length before it."""
    body = msgspec.msgpack.encode(frame)
    return LENGTH.pack(len(body)) + body


def is_encodable(value: Any) -> bool:
    """Whether a frame can hold a value: integers have 64 bits, texts are UTF-8, nesting is bounded."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return False
    return True


def decode_command(body: bytes) -> Command:
    """The command in a frame's body."""
    return _commands.decode(body)


def decode_reply(body: bytes) -> Reply:
    """The reply in a frame's body."""
    return _replies.decode(body)
