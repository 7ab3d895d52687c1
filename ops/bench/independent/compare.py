"""What a load generator says of a run against what the server counted."""

from dataclasses import dataclass

from ops.bench.independent.counts import Counts

APART_MAX_S = 0.002
"""How far mean times may be apart, once the client's own time is taken off."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. `overhead_s`: what the same load generator adds to first tokens of a server that does nothing else, None
    if that was not measured; `saturated`: the run sends as fast as the client can, so its first tokens wait in the
    client itself; `unreported`: requests that the load generator sent and says nothing of; `remarks`: what it itself
    found wrong.
    """

    run: str
    client: Counts
    server: Counts
    overhead_s: float | None = None
    saturated: bool = False
    unreported: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def ttft_apart_s(self) -> float | None:
        """By how much the client's mean TTFT is above the server's; None where they are of other requests, since a
        client counts no first token of what it cancels.
        """
        if self.client.ttft_s is None or self.server.ttft_s is None:
            return None
        return self.client.ttft_s - self.server.ttft_s if self.client.first_tokens == self.server.first_tokens else None

    @property
    def itl_apart_s(self) -> float | None:
        """By how much the client's mean time between tokens is above the server's."""
        if self.client.itl_s is None or self.server.itl_s is None:
            return None
        return self.client.itl_s - self.server.itl_s


def faults(row: Row) -> list[str]:
    """What the two sides do not agree on; nothing if they are each other's witness. Of a load generator that did not
    report all requests, only their number is a witness.
    """
    found = list(row.remarks)
    if row.unreported:
        sent = row.client.answered + row.client.errors + row.unreported
        counted = row.server.answered + row.server.errors
        return found if sent == counted else [*found, f"requests: the client sent {sent}, the server counted {counted}"]
    for name in ("answered", "errors", "input_tokens", "output_tokens"):
        seen, counted = getattr(row.client, name), getattr(row.server, name)
        if seen != counted:
            found.append(f"{name}: the client saw {seen}, the server counted {counted}")
    if not row.server.answered:
        found.append("nothing was answered")
    if row.saturated:
        return found
    if row.ttft_apart_s is not None and row.overhead_s is not None:
        beyond_s = row.ttft_apart_s - row.overhead_s
        if abs(beyond_s) > APART_MAX_S:
            found.append(f"TTFT: {1e3 * beyond_s:+.1f} ms beyond the client's own {1e3 * row.overhead_s:.1f} ms")
    if row.itl_apart_s is not None and abs(row.itl_apart_s) > APART_MAX_S:
        found.append(f"time between tokens: {1e3 * row.itl_apart_s:+.1f} ms")
    return found
