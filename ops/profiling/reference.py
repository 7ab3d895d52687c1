"""Continuations by transformers: the reference of `tidepool node check`.

With a mixture of experts the reference is not always unique: if two experts are nearly tied for the last one chosen,
rounding decides, and the logits are those of another network. The margins of the routers are kept with the logits.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from dataplane.engines.torch.model.skeleton import Skeleton

PROMPT_TOKENS = 40
WINDOW_TOKENS_MAX = 1024
"""Prompts are longer than the model's sliding window if that has at most so many tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Continuation:
    """The continuation of a prompt: `tokens`, an end-of-sequence token included, chosen from `logits`
    `[len(tokens), vocabulary]`, float32. `margins`: for each token, the least difference over the layers between the
    probabilities of the last expert chosen and the first one not chosen; infinite without experts. `margins_before`:
    the least margin of the tokens before it, prompt included, whose keys and values it attends to.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: torch.Tensor
    margins: tuple[float, ...]
    margins_before: tuple[float, ...]

    def gap(self, index: int, token: int) -> float:
        """By how much the reference prefers its own token at `index`, as a share of its largest logit there."""
        row = self.logits[index]
        return float(row.max() - row[token]) / self._scale(index)

    def distance(self, index: int, logits: torch.Tensor) -> tuple[float, float]:
        """The largest difference of other logits from those at `index`: absolute, and over the largest logit."""
        difference = float((logits.float().cpu() - self.logits[index]).abs().max())
        return difference, difference / self._scale(index)

    def _scale(self, index: int) -> float:
        return float(self.logits[index].abs().max()) or 1.0  # a padding token alone may lead to zeros


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A model run by transformers. `spreads`: for each token of each continuation, the largest difference of logits
    between transformers' pass over all tokens and its steps of one, as a share of the token's largest logit.
    `roundings`: the same between its data type and float32; empty unless it was measured.
    """

    architecture: str
    window_tokens: int | None
    eos_ids: frozenset[int]
    continuations: tuple[Continuation, ...]
    spreads: tuple[float, ...]
    roundings: tuple[float, ...] = ()


@torch.inference_mode()
def run_reference(
    folder: Path, skeleton: Skeleton, prompts: Sequence[tuple[int, ...]], *, tokens: int, device: str, rounding: bool
) -> Reference:
    """Continue each prompt greedily with transformers' `generate`, unbatched, by at most `tokens` tokens. `rounding`:
    whether to measure `Reference.roundings`.
    """
    model = _loaded(folder, skeleton.dtype, device)
    model.generation_config = GenerationConfig(eos_token_id=sorted(skeleton.eos_ids) or None, pad_token_id=0)  # type: ignore[no-untyped-call]
    continuations = []
    spreads: list[float] = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        generated = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        chosen = tuple(generated.sequences[0, len(prompt) :].tolist())
        at_once = model(generated.sequences[:, :-1], **_router_options(model))
        margins = router_margins(at_once, model.config)
        continuation = Continuation(
            prompt=prompt,
            tokens=chosen,
            logits=torch.cat(generated.logits).float().cpu(),
            margins=tuple(margins[len(prompt) - 1 :]),
            margins_before=tuple(min(margins[:end], default=math.inf) for end in range(len(prompt) - 1, len(margins))),
        )
        rows = enumerate(at_once.logits[0, len(prompt) - 1 :])
        spreads += [continuation.distance(index, row)[1] for index, row in rows]
        continuations.append(continuation)
    architecture = str(model.config.model_type)
    del model
    return Reference(
        architecture=architecture,
        window_tokens=window_tokens(skeleton),
        eos_ids=skeleton.eos_ids,
        continuations=tuple(continuations),
        spreads=tuple(spreads),
        roundings=tuple(_roundings(_loaded(folder, torch.float32, device), continuations)) if rounding else (),
    )


def _loaded(folder: Path, dtype: torch.dtype, device: str) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=dtype, local_files_only=True, trust_remote_code=False).to(device).eval()


def _roundings(exact: Any, continuations: Sequence[Continuation]) -> Iterator[float]:
    for one in continuations:
        ids = torch.tensor([[*one.prompt, *one.tokens[:-1]]], device=exact.device)
        for index, row in enumerate(exact(ids).logits[0, len(one.prompt) - 1 :]):
            yield one.distance(index, row)[1]


def _router_options(model: Any) -> dict[str, bool]:
    """Mixtures of experts return the logits of their routers with this option."""
    return {"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}


def router_margins(output: Any, config: Any) -> list[float]:
    """`Continuation.margins` for each token of one pass."""
    chosen = getattr(config, "num_experts_per_tok", 0)
    layers = [logits for logits in getattr(output, "router_logits", None) or () if logits.shape[-1] > chosen]
    if not layers:
        return [math.inf] * output.logits.shape[1]
    margins = []
    for logits in layers:
        best = logits.float().view(-1, logits.shape[-1]).softmax(-1).topk(chosen + 1).values
        margins.append(best[:, -2] - best[:, -1])
    return [float(margin) for margin in torch.stack(margins).amin(0).cpu()]


def make_prompts(skeleton: Skeleton, *, count: int, tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Random prompts from `longest_prompt` down to one token, evenly spread on a logarithmic scale."""
    chance = random.Random(seed)
    known = [token for token in range(skeleton.geometry.vocabulary) if token not in skeleton.eos_ids]
    longest = longest_prompt(skeleton, tokens=tokens)
    lengths = [round(longest ** (1 - number / max(1, count - 1))) for number in range(count)]
    return [tuple(chance.choices(known, k=length)) for length in lengths]


def longest_prompt(skeleton: Skeleton, *, tokens: int) -> int:
    """Tokens of the longest prompt, when `tokens` follow it: more than the sliding window, if the model has one."""
    window = window_tokens(skeleton) or 0
    wanted = PROMPT_TOKENS if window > WINDOW_TOKENS_MAX else max(PROMPT_TOKENS, window + window // 2)
    return max(1, min(wanted, skeleton.geometry.context_tokens - tokens))


def window_tokens(skeleton: Skeleton) -> int | None:
    """The sliding window of the model's layers in tokens, if some have one."""
    window = getattr(skeleton.model.config, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None
