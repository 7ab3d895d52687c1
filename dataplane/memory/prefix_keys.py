"""Keys of cached prefixes: a chain of hashes over the full blocks of a sequence's tokens.

    scope -> key 0 -> key 1 -> ...        key i = BLAKE2b-256(key i-1, tokens of block i); key -1 is the scope

A key stands for its block and all before it, so that equal keys have equal keys and values: those of a token depend on
all tokens before it. The scope names what else they depend on, and who may share them. The hash is cryptographic: with
a weaker one, a tenant could make a prompt whose keys are those of another tenant's prompt.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 32


def prefix_scope(*parts: str) -> bytes:
    """The start of a chain. `parts`: the identity of the model (name, checkpoint, layout of its KV), and the salt."""
    scope = blake2b(digest_size=KEY_BYTES)
    for part in parts:
        encoded = part.encode()
        scope.update(len(encoded).to_bytes(8, "little"))
        scope.update(encoded)
    return scope.digest()


class PrefixChain:
    """The keys of a sequence. `tokens` may grow, but none of them may change. Keys are computed when they are asked
    for, each once.
    """

    def __init__(self, scope: bytes, tokens: Sequence[int], block_tokens: int) -> None:
        assert block_tokens > 0, block_tokens
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._last = scope
        self._keys: list[bytes] = []

    @property
    def full_blocks(self) -> int:
        """How many blocks the present tokens fill."""
        return len(self._tokens) // self._block_tokens

    @property
    def reusable_blocks(self) -> int:
        """How many blocks a prefill may take over: one token at least is computed, whose logits give the next."""
        return max(len(self._tokens) - 1, 0) // self._block_tokens

    def keys(self, blocks: int) -> list[bytes]:
        """The keys of the first `blocks` blocks, which must be full."""
        assert blocks <= self.full_blocks, (blocks, self.full_blocks)
        for index in range(len(self._keys), blocks):
            tokens = self._tokens[index * self._block_tokens : (index + 1) * self._block_tokens]
            self._last = blake2b(self._last + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()
            self._keys.append(self._last)
        return self._keys[:blocks]
