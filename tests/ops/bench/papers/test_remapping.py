"""Models that share a slot: by hand, and what holds whichever way out of a lack of memory is taken."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dataplane.scheduling.costs import LatencyModel
from ops.bench.papers.remapping_figures import SharedFigures, measure
from ops.bench.papers.remapping_load import Recordings, SharedLoad, draw_asks
from ops.bench.papers.remapping_memory import SharedSettings, Sharing, Way
from ops.bench.papers.remapping_models import COMBINATIONS, GRACE_HOPPER, OPT_13B, SharedModel, Wire
from ops.bench.papers.remapping_slot import SharedSlot
from ops.bench.papers.remapping_tenants import Ask

WAYS: tuple[Way, ...] = get_args(Way)
LATENCY = LatencyModel(
    prefill_base_s=1.0,
    prefill_per_token_s=0.0,
    prefill_per_token2_s=0.0,
    decode_base_s=1.0,
    decode_per_context_token_s=0.0,
    decode_per_sequence_s=0.0,
)
WIRE = Wire(name="test", bytes_per_s=1000.0, both_bytes_per_s=1000.0)


def model(name: str = "a", kv_tokens: int = 100) -> SharedModel:
    """Ten layers of 100 bytes, each loaded in 0.1 s while one runs: eight can be given up, which is KV of 80 tokens."""
    return SharedModel(
        name=name, latency=LATENCY, layers=10, layers_bytes=1000, kv_bytes=10 * kv_tokens, kv_bytes_per_token=10
    )


def ask(number: int, arrived_s: float, prompt: int, output: int, of: str = "a") -> Ask:
    return Ask(number=number, arrived_s=arrived_s, model=of, prompt_tokens=prompt, output_tokens=output)


def serve(models: list[SharedModel], asks: list[Ask], settings: SharedSettings) -> tuple[SharedFigures, SharedSlot]:
    slot = SharedSlot(models, settings)
    slot.serve([replace(each) for each in asks])
    return measure(models, asks, settings), slot


def settings(way: Way = "recompute", **changes: object) -> SharedSettings:
    return SharedSettings(way=way, **({"wire": WIRE, "watermark": 0.0} | changes))  # type: ignore[arg-type]


def test_without_pressure_all_take_their_time() -> None:
    """Prefills of 1 s at 0 and 4; steps of 1 s; the second prefill falls between two tokens of the first request."""
    asks = [ask(0, 0.0, 5, 6), ask(1, 3.5, 5, 3)]
    figures, slot = serve([model()], asks, settings())
    assert [each.first_s for each in asks] == [1.0, 5.0]
    assert [each.last_s for each in asks] == [7.0, 7.0]
    assert (
        sorted(slot.tenants[0].gaps_s) == [(1.0, 1), (1.0, 1), (1.0, 1), (1.0, 1), (1.0, 2), (2.0, 1)]
        or sum(count for _, count in slot.tenants[0].gaps_s) == 7
    )
    assert (figures.ttft_p50_s, figures.ttft_p99_s) == (1.0, 1.5)
    assert figures.tokens_per_s == pytest.approx(9 / 7)
    assert figures.batch_peak == 2


def test_chunks_of_a_prompt_run_beside_the_batch() -> None:
    """Two chunks of 9 tokens, beside a batch of one: nobody waits for the prompt."""
    asks = [ask(0, 0.0, 5, 8), ask(1, 3.5, 18, 3)]
    _, slot = serve([model()], asks, settings(chunk_tokens=10))
    assert [each.first_s for each in asks] == [1.0, 6.0]
    assert [each.last_s for each in asks] == [8.0, 8.0]
    assert {gap_s for gap_s, _ in slot.tenants[0].gaps_s} == {1.0}


def test_the_last_of_the_batch_is_dropped_and_prefilled_again() -> None:
    """Room for 20 tokens: two of 8 find no more room once they have 10 each; the second begins again as a prompt."""
    asks = [ask(0, 0.0, 8, 5), ask(1, 0.0, 8, 5)]
    figures, _ = serve([model(kv_tokens=20)], asks, settings())
    assert figures.counts.recomputed == 1
    assert (figures.tbt_p99_s, figures.step_p99_s) == (3.0, 1.0), "the rest is the time without KV"
    assert asks[0].last_s == 5.0  # a prefill of both, then four steps
    assert asks[1].last_s == 7.0  # 3 tokens by then; a prefill of 8 + 3 makes the fourth, a step the fifth


def test_layers_that_are_given_up_keep_it() -> None:
    asks = [ask(0, 0.0, 8, 5), ask(1, 0.0, 8, 5)]
    figures, slot = serve([model(kv_tokens=20)], asks, settings("remap"))
    assert figures.counts.recomputed == 0
    assert figures.counts.deepened == 1
    assert figures.counts.given_bytes_max == 100
    assert figures.counts.waited_s == 0.0
    assert [each.last_s for each in asks] == [5.0, 5.0]
    assert slot.tenants[0].rotation.given_up == 1  # nothing ran after, so that nobody took it back


def test_kv_that_left_comes_back() -> None:
    """80 bytes and more go out in 0.1 s, which the step waits for; the way back is hidden behind the last step."""
    asks = [ask(0, 0.0, 8, 5), ask(1, 0.0, 8, 5)]
    figures, _ = serve([model(kv_tokens=20)], asks, settings("swap"))
    assert figures.counts.swapped == 1
    assert figures.counts.recomputed == 0
    assert asks[0].last_s == pytest.approx(5.1)
    assert asks[1].last_s == pytest.approx(7.2)


@pytest.mark.parametrize(("both_bytes_per_s", "dropped"), [(1000.0, 0), (20.0, 1)])
def test_pie_keeps_outside_what_a_step_can_move(both_bytes_per_s: float, dropped: int) -> None:
    """60 bytes of KV over its 200: out and in again in a step of 1 s, if 120 bytes fit into it."""
    wire = replace(WIRE, both_bytes_per_s=both_bytes_per_s)
    asks = [ask(0, 0.0, 8, 5), ask(1, 0.0, 8, 5)]
    figures, _ = serve([model(kv_tokens=20)], asks, settings("pie", wire=wire))
    assert figures.counts.recomputed == dropped


def test_models_take_turns() -> None:
    asks = [ask(0, 0.0, 5, 7, "a"), ask(1, 0.0, 5, 7, "b")]
    figures, slot = serve([model("a"), model("b")], asks, settings(turn_s=3.0))
    assert [each.first_s for each in asks] == [1.0, 4.0]  # a runs from 0 to 3, b from 3 to 6, and so on
    assert [each.last_s for each in asks] == [13.0, 14.0]
    assert figures.tbt_p99_s == 4.0
    assert slot.now_s == 14.0


def test_models_that_run_at_once_share_the_speed() -> None:
    asks = [ask(0, 0.0, 5, 2, "a"), ask(1, 0.0, 5, 2, "b")]
    serve([model("a"), model("b")], asks, settings(sharing="spatial"))
    assert asks[0].first_s == 1.0  # it began alone
    assert asks[1].first_s == 2.0


def test_an_inactive_model_lends_before_the_active_one() -> None:
    asks = [ask(0, 0.0, 20, 30, "a"), ask(1, 0.0, 20, 30, "a")]
    _, slot = serve([model("a", kv_tokens=25), model("b", kv_tokens=25)], asks, settings("remap"))
    assert slot.counts.recomputed == 0
    assert [tenant.rotation.given_up for tenant in slot.tenants] == [0, 5]


@examples(max_examples=25)
@given(
    way=st.sampled_from(WAYS),
    sharing=st.sampled_from(get_args(Sharing)),
    shared=st.booleans(),
    batch_max=st.integers(1, 8),
    chunk_tokens=st.sampled_from([None, None, 9]),
    bytes_per_s=st.sampled_from([10.0, 1000.0, 1e6]),
    requests=st.lists(
        st.tuples(st.floats(0.0, 40.0), st.integers(1, 12), st.integers(1, 12), st.sampled_from("ab")),
        min_size=1,
        max_size=12,
    ),
)
def test_every_request_gets_all_its_tokens(
    way: Way,
    sharing: Sharing,
    shared: bool,
    batch_max: int,
    chunk_tokens: int | None,
    bytes_per_s: float,
    requests: list[tuple[float, int, int, str]],
) -> None:
    asks = [ask(number, *each) for number, each in enumerate(sorted(requests))]
    wire = Wire(name="test", bytes_per_s=bytes_per_s, both_bytes_per_s=bytes_per_s)
    chosen = settings(way, sharing=sharing, shared_kv=shared, batch_max=batch_max, wire=wire, turn_s=3.0)
    chosen = replace(chosen, chunk_tokens=chunk_tokens)
    models = [model("a", 25), model("b", 25)]
    first, slot = serve(models, asks, chosen)
    for tenant in slot.tenants:
        assert tenant.kv_tokens == 0
        assert not tenant.has_work
        tokens = sum(each.output_tokens - 1 for each in asks if each.model == tenant.model.name)
        assert sum(count for _, count in tenant.gaps_s) == tokens
        assert all(gap_s > 0 for gap_s, _ in tenant.gaps_s)
    assert all(each.made == each.output_tokens for each in asks)
    assert all(each.arrived_s < each.first_s <= each.last_s <= slot.now_s for each in asks)
    again = [ask(number, *each) for number, each in enumerate(sorted(requests))]
    assert measure(models, again, chosen) == first


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    azure = tmp_path / "azure.csv"
    stamps = [f"2023-11-16 18:17:{second:02d}.5,100,10" for second in (3, 3, 4, 20, 21, 21, 59)]
    azure.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *stamps]))
    aegaeon = tmp_path / "workloads.csv"
    aegaeon.write_text("workload,input_len,output_len\nmine,10,20\nmine,5000,30\nother,1,1\n")
    return Recordings(azure=azure, aegaeon=aegaeon, workload="mine")


def test_a_load_keeps_its_bursts_and_has_its_rate(recordings: Recordings) -> None:
    load = SharedLoad(rates=[2.0], lengths=["sharegpt"], requests=7)
    asks = draw_asks([OPT_13B], load, recordings)
    assert [each.arrived_s for each in asks] == pytest.approx([3.5 * t / 56 for t in (0, 0, 1, 17, 18, 18, 56)])
    assert {(each.prompt_tokens, each.output_tokens) for each in asks} == {(10, 20), (1024, 30)}
    assert [vars_of(each) for each in draw_asks([OPT_13B], load, recordings)] == [vars_of(each) for each in asks]
    later = draw_asks([OPT_13B], load.follow_up(0.5), recordings, after=asks[-1])
    assert (later[0].number, later[0].arrived_s) == (7, 3.5)
    assert later[-1].arrived_s == pytest.approx(3.5 + 14.0)


def vars_of(each: Ask) -> tuple[object, ...]:
    return each.number, each.arrived_s, each.model, each.prompt_tokens, each.output_tokens


def test_rates_and_lengths_are_those_of_each_model(recordings: Recordings) -> None:
    load = SharedLoad(rates=[1.0, 0.0], lengths=["long", "short"], requests=7)
    asks = draw_asks(COMBINATIONS["C2"], load, recordings)
    assert {each.model for each in asks} == {"OPT-30b"}
    assert all(each.prompt_tokens + each.output_tokens <= 2048 for each in asks)


def test_opt_13b_is_as_the_paper_says() -> None:
    """Figure 5: two take about 52 GB of 80. At 450 GB/s its layer takes 3.0 to 3.4 times as long to load as to run."""
    assert 2 * OPT_13B.layers_bytes == pytest.approx(51e9, rel=0.03)
    load_s = OPT_13B.layer_bytes / 450e9
    compute_s = OPT_13B.latency.decode_s(10_000, 40) / OPT_13B.layers
    assert 3.0 < load_s / compute_s < 3.45
    assert OPT_13B.kv_bytes_per_token == 819_200
    assert GRACE_HOPPER.both_bytes_per_s < GRACE_HOPPER.bytes_per_s
