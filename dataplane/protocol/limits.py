"""Limits of requests that gateways and nodes both check, so that neither refuses what the other lets through."""

TEMPERATURE_MAX = 2.0
PENALTY_MAX = 2.0
"""Of `frequency_penalty` and `presence_penalty`; the least is its negative."""
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 100.0
TOP_K_MAX = 2**31 - 1
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
LOGPROBS_MAX = 20
"""Likeliest tokens whose log probabilities are reported."""
LOGIT_BIAS_MAX = 100.0
LOGIT_BIAS_TOKENS_MAX = 1024
QUESTION_TOKENS_MAX = 2**20
"""Tokens of a text that is only tokenized or detokenized, which may be longer than the model's context."""
_RESERVED = frozenset({
    "messages", "tools", "xml_tools", "documents", "add_generation_prompt", "continue_final_message",
    "raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner", "lipsum",
})  # fmt: skip


def is_reserved(variable: str) -> bool:
    """Whether a request may not set this variable of a chat template."""
    return (
        variable in _RESERVED or variable.startswith("_") or variable.endswith("_token") or not variable.isidentifier()
    )
