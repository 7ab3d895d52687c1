"""What one request of a client asks of nodes, as gateways send it and as the queue stores it."""

import hashlib
from typing import Any

import msgspec

from dataplane.protocol.messages import Generate, Task
from dataplane.protocol.tiers import Tier

CHOICES_MAX = 64
"""Answers to generate for one query."""
_SEED_BYTES = 8
_SEED_MASK = 2**63 - 1


class Query(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message for each prompt, and how many answers of each the client gets. `best_of`: so many are generated for
    each prompt, at least `n`. `prompt_cache_key`: the client's name for prompts that begin alike. `options`: what else
    the answer's shape depends on; its renderer knows the keys. `task`: what the model must answer with. `input_field`:
    the field of the client's body that the prompts come from; empty: its name is that of the message's.
    """

    prompts: tuple[Generate, ...]
    n: int = 1
    best_of: int = 1
    prompt_cache_key: str = ""
    options: dict[str, Any] = {}
    task: Task = "generate"
    input_field: str = ""

    @property
    def model(self) -> str:
        return self.prompts[0].model

    @property
    def tier(self) -> Tier:
        return self.prompts[0].tier

    def of_model(self, model: str) -> "Query":
        """The same query to another model."""
        if model == self.model:
            return self
        prompts = tuple(msgspec.structs.replace(prompt, model=model) for prompt in self.prompts)
        return msgspec.structs.replace(self, prompts=prompts)

    def choices(self, request_id: str, *, fence: str | None = None, epoch: int = 0) -> list[Generate]:
        """One message for each answer to generate: those of the first prompt, then those of the next one. The first one
        has the names of the whole request; the others have names, and fences, with their number appended.
        """
        return [
            msgspec.structs.replace(
                prompt,
                request_id=_numbered(request_id, prompt_number * self.best_of + number),
                fence=None if fence is None else _numbered(fence, prompt_number * self.best_of + number),
                epoch=epoch,
                sampling=msgspec.structs.replace(prompt.sampling, seed=seed_of(prompt.sampling.seed, number)),
            )
            for prompt_number, prompt in enumerate(self.prompts)
            for number in range(self.best_of)
        ]


def seed_of(seed: int | None, number: int) -> int | None:
    """The seed of a prompt's answer of that number: the request's own for the first; for others the first eight bytes
    of BLAKE2b of "seed:number", without the sign. None: any.
    """
    if seed is None or number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest) & _SEED_MASK


def _numbered(name: str, number: int) -> str:
    return f"{name}.{number}" if number else name
