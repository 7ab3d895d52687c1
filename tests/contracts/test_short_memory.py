"""What every engine must do where KV is short: someone makes way, everybody comes to an end, and no token shows it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dataplane.engines.interface import Engine, EngineRequest
from dataplane.protocol.tiers import Tier
from tests.contracts.engines import KV_TOKENS, PREFILL_TOKENS_PER_STEP_MAX, Subject, ask
from tests.dataplane.engines.torch.drive import drain


def alone(engine: Engine, asked: Iterable[EngineRequest]) -> dict[str, tuple[int, ...]]:
    """The tokens of each request when no other is there."""
    made = {}
    for one in asked:
        engine.add(one)
        made.update(drain(engine).tokens)
    return made


def test_a_half_prefilled_batch_request_makes_way(engine: Engine, subject: Subject) -> None:
    engine.load("b", subject.models[1])
    batch = ask("batch", 80, tier="NIW")
    urgent = ask("urgent", 60, instance_id="b", tier="IW-F")
    expected = alone(engine, (batch, urgent))
    engine.add(batch)
    while engine.stats().instances[0].kv_used_bytes == 0:
        assert engine.step() == []
    engine.add(urgent)
    assert drain(engine).tokens == expected


def test_an_older_request_that_lost_its_kv_does_not_block_the_one_it_made_way_for(
    factory: Callable[..., Subject], checkpoints: Path
) -> None:
    with closing(factory(checkpoints, host_kv_tokens=8)) as short:
        engine = short.engine
        engine.load("a", short.models[0])
        older, urgent = ask("older", 40, max_tokens=30), ask("urgent", 70, tier="IW-F")
        expected = alone(engine, (older, urgent))
        engine.add(older)
        made: list[int] = []
        while not made:
            made += [token for output in engine.step() for token in output.token_ids]
        engine.add(urgent)
        rest = drain(engine).tokens
        assert {**rest, "older": (*made, *rest["older"])} == expected
        assert engine.stats().extra["recomputed"] > 0


@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("left", [1, 2])
def test_one_that_makes_way_with_its_prompts_last_tokens_to_do_makes_the_same_tokens(
    engine: Engine, subject: Subject, left: int, where: str
) -> None:
    engine.load("b", subject.models[1])
    first = ask("first", PREFILL_TOKENS_PER_STEP_MAX + left, tier="NIW")
    urgent = ask("urgent", KV_TOKENS - PREFILL_TOKENS_PER_STEP_MAX - 2, instance_id=where, tier="IW-F")
    expected = alone(engine, (first, urgent))
    engine.add(first)
    while engine.stats().instances[0].kv_used_bytes == 0:
        assert engine.step() == []
    engine.add(urgent)
    assert drain(engine).tokens == expected


class Pair:
    """An engine with room for two models of KV of `KV_TOKENS` tokens, and what it says when nobody disturbs it."""

    def __init__(self, subject: Subject) -> None:
        self.engine = subject.engine
        self._made: dict[tuple[str, int, int], tuple[int, ...]] = {}
        for instance_id, model in zip("ab", subject.models, strict=True):
            self.engine.load(instance_id, model)

    def undisturbed(self, asked: EngineRequest) -> tuple[int, ...]:
        shape = (asked.instance_id, len(asked.prompt), asked.max_tokens)
        if shape not in self._made:
            (self._made[shape],) = alone(self.engine, [asked]).values()
        return self._made[shape]


@pytest.fixture(scope="module", params=[8, KV_TOKENS])
def pair(request: pytest.FixtureRequest, factory: Callable[..., Subject], checkpoints: Path) -> Iterator[Pair]:
    """With hardly any host memory, and with as much as there is on the slot."""
    subject = factory(checkpoints, host_kv_tokens=request.param)
    yield Pair(subject)
    subject.close()


TIERS = st.sampled_from(["IW-F", "IW-N", "NIW"])
PROMPT_TOKENS = st.sampled_from([1, 20, PREFILL_TOKENS_PER_STEP_MAX + 1, 50, 2 * PREFILL_TOKENS_PER_STEP_MAX + 1, 80])


@given(st.lists(st.tuples(st.sampled_from("ab"), TIERS, PROMPT_TOKENS, st.integers(0, 6)), min_size=2, max_size=6))
@example([("b", "NIW", 65, 0), ("a", "NIW", 33, 3)])  # a prefill and a decode took each other's weights for ever
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nobody_blocks_another_for_ever_and_no_token_shows_who_made_way(
    pair: Pair, arrivals: list[tuple[str, Tier, int, int]]
) -> None:
    """Whatever is half prefilled when others come, of whatever tier, model and length. The last number of each: how
    many steps after the one before it.
    """
    asked = [
        replace(ask("same", prompt_tokens, tier=tier, instance_id=where, max_tokens=6), request_id=f"r{number}")
        for number, (where, tier, prompt_tokens, _) in enumerate(arrivals)
    ]
    expected = {one.request_id: pair.undisturbed(one) for one in asked}
    later: dict[int, list[EngineRequest]] = {}
    step = 0
    for one, (_, _, _, wait_steps) in zip(asked, arrivals, strict=True):
        step += wait_steps
        later.setdefault(step, []).append(one)
    assert drain(pair.engine, later=later).tokens == expected
    assert [instance.kv_used_bytes for instance in pair.engine.stats().instances] == [0, 0]
