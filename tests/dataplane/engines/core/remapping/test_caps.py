"""How many layers of a model may be offloaded, with the arithmetic in the row."""

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dataplane.engines.core.remapping.caps import Cap, ModelFacts, choose_cap, circle_of, rotation_of, wait_s
from dataplane.engines.core.remapping.circle import is_hidden
from dataplane.engines.core.remapping.settings import RemapSettings

PLAIN = RemapSettings(margin=0.0, share_max=1.0)


def model(compute_s: float | None, **changes: object) -> ModelFacts:
    facts = {"model": "a", "layers": 40, "layer_bytes": 600, "load_s": 0.001, "active": True, "compute_s": compute_s}
    return ModelFacts(**(facts | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compute_s", "settings", "expected"),
    [
        (None, PLAIN, Cap(layers=0, reason="unmeasured")),
        (0.0134, PLAIN, Cap(layers=11, reason="not hidden")),  # T_c = T_T / 2.985: 13 loads of m = alpha + 2 fit
        (0.0134, RemapSettings(margin=0.1, share_max=1.0), Cap(layers=10, reason="not hidden")),  # 12 x 1.1 = 13.2
        (0.0134, RemapSettings(margin=0.0, share_max=1.0, frames_max=1), Cap(layers=9, reason="not hidden")),
        (0.0134, RemapSettings(margin=0.0, share_max=0.2), Cap(layers=8, reason="share_max")),
        (0.0010, PLAIN, Cap(layers=0, reason="not hidden")),
        (1.0, PLAIN, Cap(layers=38, reason="not hidden")),  # two frames for all forty; one more would wait for its own
        (0.0010, RemapSettings(capped=False, share_max=1.0), Cap(layers=39, reason="layers")),
        (0.0010, RemapSettings(capped=False, share_max=0.5), Cap(layers=20, reason="share_max")),
    ],
)
def test_caps(compute_s: float | None, settings: RemapSettings, expected: Cap) -> None:
    assert choose_cap(model(compute_s), settings) == expected


@pytest.mark.parametrize(
    ("offloaded", "cap"),
    [(3, Cap(layers=3, reason="switching")), (12, Cap(layers=11, reason="not hidden"))],
)
def test_a_model_whose_region_is_kept_offloads_no_more_and_reclaims_what_is_not_hidden(
    offloaded: int, cap: Cap
) -> None:
    assert choose_cap(model(0.0134, offloaded=offloaded, kept=True), PLAIN) == cap


def test_a_step_waits_for_what_is_not_hidden() -> None:
    """One frame, two layers: each of 1 ms is loaded while 19 layers run for 0.5 ms, twice a round."""
    slow = model(0.020 * 0.5)
    rotation = rotation_of(slow, 1, RemapSettings(frames_max=1))
    assert wait_s(slow, rotation) == pytest.approx(0.0)
    fast = model(0.040 * 0.02)
    assert wait_s(fast, rotation) == pytest.approx(2 * (0.001 - 19 * 0.00002))
    assert wait_s(model(None), rotation) == 0.0


@examples(max_examples=50)
@given(
    layers=st.integers(1, 60),
    load_s=st.floats(1e-4, 0.1),
    compute_s=st.floats(1e-3, 1.0),
    margin=st.floats(0.0, 0.5),
    share_max=st.floats(0.0, 1.0),
    frames_max=st.integers(1, 3),
)
def test_what_a_cap_allows_never_makes_a_step_slower(
    layers: int, load_s: float, compute_s: float, margin: float, share_max: float, frames_max: int
) -> None:
    facts = model(compute_s, layers=layers, load_s=load_s)
    settings = RemapSettings(margin=margin, share_max=share_max, frames_max=frames_max)
    cap = choose_cap(facts, settings)
    assert cap.layers < layers
    assert cap.layers <= share_max * layers
    circle = circle_of(facts, settings)
    assert circle is not None
    for offloaded in range(cap.layers + 1):
        rotation = rotation_of(facts, offloaded, settings)
        assert rotation.offloaded == offloaded
        assert is_hidden(circle, rotation)
        assert wait_s(facts, rotation) == 0.0
        assert rotation.rotating_layers * load_s * (1 + margin) <= compute_s * (1 + 1e-9)
        assert offloaded * load_s <= compute_s  # the paper's T_T x N <= T_compute


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"margin": -0.1}, "margin"),
        ({"share_max": 1.1}, "share_max"),
        ({"frames_min": 2, "frames_max": 1}, "frames_min"),
        ({"frames_max": 4}, "frames_max"),
        ({"spare_layers": -1.0}, "spare_layers"),
        ({"settle_s": -1.0}, "settle_s"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RemapSettings(**changes)  # type: ignore[arg-type]
