"""What a heartbeat says of the other hosts of slots whose GPUs are of several."""

import msgspec


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """A host but the first of a slot. `host`: its number there, from 1; `hostname`: as its follower says, None before
    the first report. `connected`: its follower reports; `silent_s`: how long ago it did, None: it has not yet.
    `refusal`: why its last report was refused, if it was.
    """

    slot: int
    host: int
    connected: bool
    hostname: str | None = None
    silent_s: float | None = None
    refusal: str | None = None
