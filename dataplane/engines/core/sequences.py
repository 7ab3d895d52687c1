"""A request in an engine, and the chunks of it that one step runs. No tensors here.

`tokens` are its prompt and what was generated; the first `cached` of them have keys and values:

    tokens   | prompt ............... | generated .. |
    cached   | ..................|                        prefill: several tokens may be pending
    cached   | .................................. |       decode: exactly the last token is pending

A step turns pending tokens into cached ones, and the last pending token's logits into one more token.
"""

from typing import Generic

from msgspec import Struct

from dataplane.constraints.matcher import Matcher
from dataplane.engines.core.kv import KvT
from dataplane.engines.interface import EngineRequest
from dataplane.scheduling.prefill import PrefillRequest
from dataplane.scheduling.tiers import TIER_RANKS


class TokenSequence(Struct, Generic[KvT], eq=False, kw_only=True, weakref=True):
    """A request and its progress. `order`: its number in the order of arrival; `added_s`: when it was added;
    `prefilled`: its prefill is complete, here or elsewhere; `begun`: it has KV at any location, and is in the list of
    its model; `resumed_at`: how many tokens it had when it was last swapped in; `tbt_s`: its objective between tokens;
    `values`: the answer of a request with `pooling`, set by the step that completes its prefill; `matcher`: which
    tokens may come next, for a request with a constraint; `reused`: how many of its cached tokens its prefill took over
    from the prefix cache; `adapter`: the name of its LoRA adapter, empty for the model itself.
    """

    request: EngineRequest
    model: str
    order: int
    added_s: float
    kv: KvT
    tokens: list[int] = []
    cached: int = 0
    reused: int = 0
    adapter: str = ""
    prefilled: bool = False
    begun: bool = False
    resumed_at: int = 0
    values: tuple[float, ...] = ()
    matcher: Matcher | None = None
    key: tuple[int, int] = (0, 0)
    """The order of service: by tier, then first come, first served."""
    tbt_s: float = 0.0

    def __post_init__(self) -> None:
        """Set what follows from the request: `tokens`, `key` and `tbt_s`."""
        request = self.request
        self.tokens = list(request.prompt + request.generated)
        self.key = TIER_RANKS[request.tier], self.order
        self.tbt_s = request.promise.tbt_s

    @property
    def answers_as(self) -> str:
        """The name of the model that its request asked for."""
        return self.adapter or self.model

    @property
    def just_resumed(self) -> bool:
        """Whether it has made no token since it was last swapped in."""
        return self.resumed_at == len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens without keys and values; at least 1 between steps."""
        return len(self.tokens) - self.cached

    @property
    def generated(self) -> int:
        """How many tokens were made so far, here and elsewhere."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def first(self) -> bool:
        """Whether it waits for its first prefill here, and no other slot did that."""
        return not self.prefilled and self.generated == len(self.request.generated)

    @property
    def kv_tokens(self) -> int:
        """Tokens that need KV for its prefill, and for the first token of its answer if it has one."""
        return len(self.tokens) + (not self.request.pooling)

    @property
    def deadline_s(self) -> float:
        """When its next token is due. The next token of a request begun elsewhere is due one TBT after it was added."""
        promise = self.request.promise
        made = self.generated - len(self.request.generated)
        return self.added_s + (promise.tbt_s if self.request.generated else promise.ttft_s) + made * promise.tbt_s

    def to_prefill(self) -> PrefillRequest:
        return PrefillRequest(
            request_id=self.request.request_id,
            model=self.model,
            tokens=self.pending,
            tier=self.request.tier,
            arrived_s=self.added_s,
            ttft_s=self.request.promise.ttft_s,
        )


class Chunk(Struct, Generic[KvT], frozen=True, kw_only=True):
    """The next `count` pending tokens of a sequence, run in one step."""

    sequence: TokenSequence[KvT]
    count: int

    @property
    def end(self) -> int:
        """How many tokens are cached after it."""
        return self.sequence.cached + self.count

    @property
    def squared_tokens(self) -> int:
        """The cost of attention: the growth of the squared length."""
        return self.end**2 - self.sequence.cached**2

    @property
    def makes_token(self) -> bool:
        """Whether no token is pending after it, so that its last logits give the next token."""
        return self.count == self.sequence.pending
