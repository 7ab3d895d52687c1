"""The limits of sampling parameters, which a node checks before it tokenizes a request."""

from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.limits import (
    LOGIT_BIAS_MAX,
    LOGIT_BIAS_TOKENS_MAX,
    LOGPROBS_MAX,
    PENALTY_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    SEED_MAX,
    SEED_MIN,
    TEMPERATURE_MAX,
    TOP_K_MAX,
)
from dataplane.protocol.messages import Generate, Sampling

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, TEMPERATURE_MAX),
    "min_p": (0, 1),
    "frequency_penalty": (-PENALTY_MAX, PENALTY_MAX),
    "presence_penalty": (-PENALTY_MAX, PENALTY_MAX),
    "repetition_penalty": (REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX),
    "logprobs": (0, LOGPROBS_MAX),
    "seed": (SEED_MIN, SEED_MAX),
}
"""The least and the greatest value; None is none."""


def check_sampling(generate: Generate, *, stop_strings_max: int) -> None:
    """Refuse sampling parameters out of range.

    Raises:
        BadRequestError: names the field and its limits.
    """
    sampling = generate.sampling
    sources = (generate.messages, generate.prompt, generate.prompt_tokens)
    if sum(source is not None for source in sources) != 1:
        raise BadRequestError("exactly one of messages, prompt and prompt_tokens must be set", param="messages")
    for name, (least, greatest) in _RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not least <= value <= greatest:
            raise BadRequestError(f"{name} must be {least:g} to {greatest:g}, not {value}", param=name)
    if not 0 < sampling.top_p <= 1:
        raise BadRequestError(f"top_p must be over 0 and at most 1, not {sampling.top_p}", param="top_p")
    if not 0 <= sampling.top_k <= TOP_K_MAX:
        limits = f"0, which is no limit, to {TOP_K_MAX}"
        raise BadRequestError(f"top_k must be {limits}, not {sampling.top_k}", param="top_k")
    _check_lengths(sampling)
    _check_bias(sampling)
    if len(sampling.stop) > stop_strings_max:
        raise BadRequestError(f"stop holds {len(sampling.stop)} strings; {stop_strings_max} is the limit", param="stop")
    if generate.sent_chars < 0:
        raise BadRequestError(f"sent_chars must be at least 0, not {generate.sent_chars}", param="sent_chars")
    if "" in sampling.stop:
        raise BadRequestError("stop must not hold an empty string", param="stop")


def _check_lengths(sampling: Sampling) -> None:
    """Without `max_tokens`, an answer that may not end before `min_tokens` ends where the context does."""
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, not {sampling.max_tokens}", param="max_tokens")
    if sampling.min_tokens < 0:
        raise BadRequestError(f"min_tokens must be at least 0, not {sampling.min_tokens}", param="min_tokens")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise BadRequestError(
            f"min_tokens must be at most max_tokens, {sampling.max_tokens}, not {sampling.min_tokens}",
            param="min_tokens",
        )


def _check_bias(sampling: Sampling) -> None:
    entries = len(sampling.logit_bias)
    if entries > LOGIT_BIAS_TOKENS_MAX:
        raise BadRequestError(
            f"logit_bias holds {entries} tokens; {LOGIT_BIAS_TOKENS_MAX} is the limit", param="logit_bias"
        )
    for token, bias in sampling.logit_bias:
        if not -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX:
            limits = f"{-LOGIT_BIAS_MAX:g} to {LOGIT_BIAS_MAX:g}"
            raise BadRequestError(f"logit_bias of token {token} must be {limits}, not {bias}", param="logit_bias")
