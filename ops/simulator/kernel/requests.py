"""A request, how well it was served, and its place on an instance."""

import math

from msgspec import Struct

from dataplane.protocol.tiers import Objective, Tier
from dataplane.scheduling.tiers import TIER_RANKS
from ops.simulator.kernel.fast_forwards import FastForward

BLOCK_TOKENS = 512
"""Tokens of a block of a prompt, as Mooncake's traces hash them."""


class Request(Struct, frozen=True, gc=False):
    """What comes in. `number`: from 0, in the order of arrival. `origin`: the region it comes from. `blocks`: of its
    prompt, a hash for each full block and all before it; empty: not known, and then no prompt has a beginning in common
    with another.
    """

    number: int
    arrived_s: float
    model: str
    origin: str
    tier: Tier
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()

    @property
    def reusable(self) -> tuple[int, ...]:
        """The blocks that a prefill may take from a cache: at least one token is computed."""
        return self.blocks[: (self.prompt_tokens - 1) // BLOCK_TOKENS]


class Served(Struct, eq=False):
    """A request in flight. `back_s`: the latency of its tokens to its origin; all times are at the instance. `cached`:
    tokens of the prompt that its instance had cached.

    `late_s` is the most that any token was late by the fixed schedule. A deadline that restarts from each late token
    moves by exactly that much in all, so it is also the overdue time of `scheduling.attainment.service_share`.
    """

    request: Request
    target: Objective
    back_s: float = 0.0
    made: int = 0
    in_time: int = 0
    late_s: float = -math.inf
    first_s: float = math.nan
    last_s: float = math.nan
    cached: int = 0

    @property
    def left(self) -> int:
        """Output tokens still to make."""
        return self.request.output_tokens - self.made

    @property
    def next_due_s(self) -> float:
        """When the next token must leave the instance."""
        target = self.target
        return self.request.arrived_s + target.ttft_s - self.back_s + self.made * target.tbt_s

    def token(self, at_s: float) -> None:
        """Count a token that is out at a moment."""
        if not self.made:
            self.first_s = at_s
        late_s = at_s - self.next_due_s
        self.take(1, late_s, late_s <= 0, at_s)

    def fast_forward(self, fast_forward: FastForward) -> None:
        """Count one token for each step."""
        if not self.made:
            self.first_s = fast_forward.ended_s(1)
        due_s, tbt_s = self.next_due_s, self.target.tbt_s
        late_s = fast_forward.late_s(due_s, tbt_s)
        in_time = fast_forward.steps if late_s <= 0 else fast_forward.in_time(due_s, tbt_s)
        self.take(fast_forward.steps, late_s, in_time, fast_forward.ended_s(fast_forward.steps))

    def take(self, tokens: int, late_s: float, in_time: int, last_s: float) -> None:
        """Count tokens: the largest lateness, the number in time, and the time of the last one."""
        self.made += tokens
        self.in_time += in_time
        self.late_s = max(self.late_s, late_s)
        self.last_s = last_s
        assert self.made <= self.request.output_tokens

    @property
    def ttft_s(self) -> float:
        """From arrival until the first token is back at the origin."""
        return self.first_s + self.back_s - self.request.arrived_s

    @property
    def service_s(self) -> float:
        """From arrival until the last token is back at the origin."""
        return self.last_s + self.back_s - self.request.arrived_s

    @property
    def share(self) -> float:
        """Share of its service time without an overdue token: see `dataplane.scheduling.attainment.service_share`."""
        return 1.0 - self.late_s / self.service_s if self.late_s > 0 else 1.0


class Sequence(Struct, eq=False):
    """A request on an instance. `order`: place in the order of arrival. `cached`: tokens with KV, as of when it joined
    the batch; it did so after `joined` steps. `expected`: tokens that were in the prefix cache when it came; `held`:
    its blocks that the cache keeps for it.
    """

    served: Served
    order: int
    cached: int = 0
    joined: int = 0
    expected: int = 0
    held: tuple[int, ...] = ()

    @property
    def model(self) -> str:
        return self.served.request.model

    @property
    def key(self) -> tuple[int, int]:
        """The order of service: by tier, then first come, first served."""
        return TIER_RANKS[self.served.request.tier], self.order
