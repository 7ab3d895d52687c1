"""Step times of a model that nobody has measured on a card, from its size and the card's data sheet.

A prefill is bound by arithmetic, a decode step by reading the weights, and each sequence of its batch by both. With W
bytes of weights, N parameters (W / 2 if they are not known), F operations and B bytes a second:

    prefill   7 ms + 2 N / (0.65 F) a token + 2 H / (0.3 F) a pair of tokens
    decode    3.5 ms + 1.2 W / B + (KV bytes of a token) / B a context token + (0.1 ms + 2 N / F) a sequence

H is layers times width, of a usual shape (width = 128 layers, N = 12 layers width^2). Under tensor parallelism among R
GPUs, operations and bytes a second are R times as many, and the ranks add up their results twice a layer (a ring): each
GPU sends 2 (R - 1) / R times 4 H bytes of a token, at 0.55 of its link to the others, and a prefill starts 7 ms and a
decode step 10 ms later.

The constants were chosen by eye on the points that are published with Aegaeon's artifact: single A10, A100, H20, H100,
H800 with models of 6 to 14 billion parameters, and two and four H800 with models of 7 to 14 billion.
`python -m ops.bench.engine.guessed_times` says how far off they are.
"""

from dataclasses import dataclass

from dataplane.scheduling.costs import LatencyModel, switch_s
from ops.profiling.cards import Card

TRANSFER_EFFICIENCY = 0.625
"""beta of Aegaeon A.2: the share of the host link's bandwidth that loads of weights reach."""
_PREFILL_BASE_S, _DECODE_BASE_S, _SEQUENCE_S = 7e-3, 3.5e-3, 1e-4
_LINEAR_EFFICIENCY, _ATTENTION_EFFICIENCY, _READS = 0.65, 0.3, 1.2
_GROUP_PREFILL_S, _GROUP_DECODE_S, _LINK_EFFICIENCY = 7e-3, 1e-2, 0.55
_SUMMED_BYTES = 4
"""Of a layer and value of the hidden size: two sums of two bytes."""
_WIDTH_PER_LAYER, _MATRICES = 128, 12
_PARAMETER_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class GuessedTimes:
    """Of one model on one card, or on several. `switch_s`: to bring its weights from host memory."""

    latency: LatencyModel
    switch_s: float
    source: str


def guess_times(
    weights_bytes: int, kv_bytes_per_token: int, card: Card, parameters: int | None = None, *, gpus: int = 1
) -> GuessedTimes:
    """Guess. A mixture of experts counts as if every token passed all of them, so it is guessed too slow. Quantized
    weights count as if a step read them packed.

    Args:
        weights_bytes: of the whole model, as `kv_bytes_per_token` and `parameters`.
        card: each of the GPUs.
        gpus: that run the model together, of one node.
    """
    assert weights_bytes > 0
    assert gpus > 0
    parameters = parameters or weights_bytes // _PARAMETER_BYTES
    layers = (parameters / (_MATRICES * _WIDTH_PER_LAYER**2)) ** (1 / 3)
    flops, memory_bytes_per_s = gpus * card.flops, gpus * card.memory_bytes_per_s
    token_s = 2 * parameters / flops
    is_group = gpus > 1
    latency = LatencyModel(
        prefill_base_s=_PREFILL_BASE_S + is_group * _GROUP_PREFILL_S,
        prefill_per_token_s=token_s / _LINEAR_EFFICIENCY + _sums_s(layers, card, gpus),
        prefill_per_token2_s=2 * _WIDTH_PER_LAYER * layers**2 / (_ATTENTION_EFFICIENCY * flops),
        decode_base_s=_DECODE_BASE_S + is_group * _GROUP_DECODE_S + _READS * weights_bytes / memory_bytes_per_s,
        decode_per_context_token_s=kv_bytes_per_token / memory_bytes_per_s,
        decode_per_sequence_s=_SEQUENCE_S + token_s,
    )
    name = f"{gpus} {card.name}" if is_group else card.name
    return GuessedTimes(
        latency=latency,
        switch_s=switch_s(weights_bytes, gpus * card.pcie_bytes_per_s, TRANSFER_EFFICIENCY),
        source=f"a guess for {name}, until `tidepool node profile` has measured it",
    )


def _sums_s(layers: float, card: Card, gpus: int) -> float:
    """How long the ranks add up the results of a token."""
    sent_bytes = 2 * (gpus - 1) / gpus * _SUMMED_BYTES * _WIDTH_PER_LAYER * layers**2
    return sent_bytes / (_LINK_EFFICIENCY * card.link_bytes_per_s)
