"""Step times of a model that nobody has measured on a card, from its size and the card's data sheet.

A prefill is bound by arithmetic, a decode step by reading the weights, and each sequence of its batch by both. With W
bytes of weights, N parameters (W / 2 if they are not known), F operations and B bytes a second:

    prefill   7 ms + 2 N / (0.65 F) a token + 2 H / (0.3 F) a pair of tokens
    decode    3.5 ms + 1.2 W / B + (KV bytes of a token) / B a context token + (0.1 ms + 2 N / F) a sequence

H is layers times width, of a usual shape (width = 128 layers, N = 12 layers width^2). The constants were chosen by eye
on the single-GPU fits of the profiles that are published with Aegaeon's artifact: A10, A100, H20, H100, H800, models
of 6 to 14 billion parameters. `python -m ops.bench.engine.guessed_times` says how far off they are.
"""

from dataclasses import dataclass

from dataplane.scheduling.costs import LatencyModel, switch_s
from ops.profiling.cards import Card

TRANSFER_EFFICIENCY = 0.625
"""beta of Aegaeon A.2: the share of the host link's bandwidth that loads of weights reach."""
_PREFILL_BASE_S, _DECODE_BASE_S, _SEQUENCE_S = 7e-3, 3.5e-3, 1e-4
_LINEAR_EFFICIENCY, _ATTENTION_EFFICIENCY, _READS = 0.65, 0.3, 1.2
_WIDTH_PER_LAYER, _MATRICES = 128, 12
_PARAMETER_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class GuessedTimes:
    """Of one model on one card. `switch_s`: to bring its weights from host memory."""

    latency: LatencyModel
    switch_s: float
    source: str


def guess_times(weights_bytes: int, kv_bytes_per_token: int, card: Card, parameters: int | None = None) -> GuessedTimes:
    """Guess. A mixture of experts counts as if every token passed all of them, so it is guessed too slow. Quantized
    weights count as if a step read them packed; the torch engine, which unpacks them, is slower.
    """
    assert weights_bytes > 0
    parameters = parameters or weights_bytes // _PARAMETER_BYTES
    layers = (parameters / (_MATRICES * _WIDTH_PER_LAYER**2)) ** (1 / 3)
    token_s = 2 * parameters / card.flops
    read_s = weights_bytes / card.memory_bytes_per_s
    latency = LatencyModel(
        prefill_base_s=_PREFILL_BASE_S,
        prefill_per_token_s=token_s / _LINEAR_EFFICIENCY,
        prefill_per_token2_s=2 * _WIDTH_PER_LAYER * layers**2 / (_ATTENTION_EFFICIENCY * card.flops),
        decode_base_s=_DECODE_BASE_S + _READS * read_s,
        decode_per_context_token_s=kv_bytes_per_token / card.memory_bytes_per_s,
        decode_per_sequence_s=_SEQUENCE_S + token_s,
    )
    return GuessedTimes(
        latency=latency,
        switch_s=switch_s(weights_bytes, card.pcie_bytes_per_s, TRANSFER_EFFICIENCY),
        source=f"a guess for {card.name}, until `tidepool node profile` has measured it",
    )
