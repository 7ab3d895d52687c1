"""Whether weights fit on slots, and how it is said where they do not."""

import pytest

from controlplane.policies.fit import ModelSize, WeightsMemory, fits, needed_bytes, why_unfit

MIB = 2**20
STORED = ModelSize(weights_bytes=257 * MIB, parameters=257 * MIB // 2)
"""A checkpoint in bfloat16."""


def room(mib: int | None, dtype: str | None = "float32") -> WeightsMemory:
    return WeightsMemory(weights_bytes=None if mib is None else mib * MIB, dtype=dtype)


@pytest.mark.parametrize(
    ("where", "needed_mib", "fitting"),
    [
        (room(256), 514, False),
        (room(513), 514, False),
        (room(514), 514, True),
        (room(256, "bfloat16"), 257, False),
        (room(257, "bfloat16"), 257, True),
        (room(256, None), 257, False),  # a replay
        (room(None), 514, True),  # an agent that does not say
        (room(None, None), 257, True),
    ],
)
def test_weights_count_in_the_type_of_the_node(where: WeightsMemory, needed_mib: int, *, fitting: bool) -> None:
    assert needed_bytes(STORED, where) == needed_mib * MIB
    assert fits(STORED, where) is fitting


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_quantized_weights_count_as_they_are_stored(dtype: str | None) -> None:
    """72 million parameters in 4 bits with their scales, on a slot whose memory is that of two GPUs."""
    packed = ModelSize(weights_bytes=40 * MIB, parameters=72 * MIB)
    assert needed_bytes(packed, room(64, dtype)) == 40 * MIB
    assert fits(packed, room(40, dtype))
    assert not fits(packed, room(39, dtype))
    reason = why_unfit("m", packed, [("H800", room(39, dtype))], "us-east") or ""
    assert "40 MiB as stored, the largest slot of H800 has 39 MiB" in reason
    assert "TIDEPOOL_AGENT_DTYPE" not in reason, "it would not help"


def test_a_rounded_number_of_parameters_makes_no_quantized_weights() -> None:
    """72.3 million parameters in bfloat16 that were registered as 75 million."""
    rounded = ModelSize(weights_bytes=2 * 72_300_000, parameters=75_000_000)
    assert needed_bytes(rounded, room(64, "float32")) == 4 * 75_000_000


def test_what_is_not_known_is_not_held_against_a_model() -> None:
    unknown = ModelSize(weights_bytes=257 * MIB)
    assert needed_bytes(unknown, room(256)) is None
    assert fits(unknown, room(256)), "stored as float32 it might be half as large there"
    assert needed_bytes(STORED, room(256, "float8")) is None
    assert why_unfit("m", unknown, [("H800", room(256))], "us-east") is None


def test_a_misfit_says_mib_and_what_to_change() -> None:
    small = [("H800", room(200)), ("H800", room(300)), ("L40S", room(100, "bfloat16"))]
    words = why_unfit("m", STORED, small, "us-east")
    assert words == (
        "the weights of m fit on no slot in us-east: 514 MiB in float32, the largest slot of H800 has 300 MiB for"
        " weights; 257 MiB in bfloat16, the largest slot of L40S has 100 MiB for weights. To change that set"
        " TIDEPOOL_AGENT_DTYPE=bfloat16 there, give slots more memory_bytes or a smaller TIDEPOOL_AGENT_KV_SHARE, or"
        " take a smaller model"
    )
    assert "TIDEPOOL_AGENT_DTYPE" not in (why_unfit("m", STORED, small[:1], "us-east") or ""), "it would not help"
    assert why_unfit("m", STORED, [*small, ("L40S", room(257, "bfloat16"))], "us-east") is None
    assert why_unfit("m", STORED, [], "us-east") is None, "nobody has joined"
