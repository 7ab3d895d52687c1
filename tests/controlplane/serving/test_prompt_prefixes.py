"""Prompts as a chain of keys, and what a process learns of what instances have cached."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.policies.decisions import Route
from controlplane.serving.prompt_prefixes import CachedPrefixes, PromptPrefix, SentPrompt, prefix_of
from controlplane.store.redis.live import FleetView, NodeView
from dataplane.protocol.messages import (
    ChatMessage,
    Finished,
    Generate,
    Heartbeat,
    InstanceReport,
    InstanceState,
    Tool,
    ToolUse,
)
from dataplane.protocol.tiers import Tier

SYSTEM = ChatMessage(role="system", content="You answer in one word. " * 40)


def asked(**fields: Any) -> Generate:
    return Generate(request_id="r", instance_id="", model="tide", tier=Tier.IW_N, **fields)


def chat(*turns: str, **fields: Any) -> Generate:
    roles = ("user", "assistant")
    said = tuple(ChatMessage(role=roles[number % 2], content=text) for number, text in enumerate(turns))
    return asked(messages=(SYSTEM, *said), **fields)


def shared(one: PromptPrefix, other: PromptPrefix) -> int:
    """How many leading keys two prompts share."""
    pairs = zip(one.keys, other.keys, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one.keys), len(other.keys)))


def test_a_turn_begins_with_the_turns_before_it() -> None:
    one = prefix_of(chat("How high is it? " * 100))
    two = prefix_of(chat("How high is it? " * 100, "High. " * 100, "And how deep?"))
    assert len(one.keys) > 4
    assert shared(one, two) >= len(one.keys) - 1, "but for the end of the list in the last piece"
    assert one.home_key == two.home_key
    assert two.tokens(len(one.keys), 1000) == pytest.approx(1000 * one.size_bytes / two.size_bytes, rel=0.15)
    assert two.tokens(0, 1000) == 0


def test_other_conversations_share_their_beginning_and_no_home() -> None:
    one, other = prefix_of(chat("Where is the harbour? " * 50)), prefix_of(chat("Who is the captain? " * 50))
    assert 3 <= shared(one, other) < len(one.keys) - 1, "the system message alone"
    assert one.home_key != other.home_key


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_salt": "another"},
        {"model": "ebb"},
        {"tools": ToolUse(tools=(Tool(name="tide_at"),))},
        {"template": {"thinking": False}},
    ],
)
def test_what_changes_the_prompt_or_its_owner_shares_nothing(changes: dict[str, Any]) -> None:
    one = chat("Where?")
    assert shared(prefix_of(one), prefix_of(replace(one, **changes))) == 0


def test_text_and_token_prompts() -> None:
    text = "The tide is high. " * 60
    assert shared(prefix_of(asked(prompt=text)), prefix_of(asked(prompt=text + "Really."))) == len(
        prefix_of(asked(prompt=text)).keys
    )
    one = prefix_of(asked(prompt_tokens=tuple(range(1000))))
    other = prefix_of(asked(prompt_tokens=(*range(500), *range(500))))
    assert one.tokens(shared(one, other), 1000) == pytest.approx(500, abs=64)
    assert prefix_of(asked(prompt_tokens=(2**40,))).keys == ()
    assert prefix_of(asked(prompt="")).tokens(0, 0) == 0


def test_a_prompt_cache_key_names_the_conversation() -> None:
    one, other = chat("Where is the harbour?"), chat("Who is the captain?")
    assert prefix_of(one, "session 7").home_key == prefix_of(other, "session 7").home_key
    assert prefix_of(one, "session 7").home_key != prefix_of(one, "session 8").home_key
    assert prefix_of(one, "session 7").home_key != prefix_of(replace(one, cache_salt="t2"), "session 7").home_key


PREFIX = prefix_of(chat("How high is it? " * 100))


def sent(known: CachedPrefixes, instance: str, *, expected: int = 0) -> SentPrompt:
    route = Route(instance_id=instance, node_id="n", region="east", utilization=0.0, cached_tokens=expected)
    return known.begin(PREFIX, route)


def finished(cached: int) -> Finished:
    return Finished(finish_reason="stop", prompt_tokens=1000, completion_tokens=1, cached_tokens=cached)


def view(boot_id: str = "1", state: InstanceState = "ready", instance: str = "a") -> FleetView:
    report = InstanceReport(instance_id=instance, model="tide", slot=0, state=state)
    beat = Heartbeat(node="n", boot_id=boot_id, generation=1, instances=(report,))
    node = NodeView(region="east", gpu_type="g", url="u", received_s=0.0, heartbeat=beat)
    return FleetView(read_s=0.0, nodes={"n": node})


def test_a_prompt_is_expected_where_it_was_sent_and_not_where_it_failed() -> None:
    known = CachedPrefixes(1000)
    assert known.cached_tokens(PREFIX, 1000) == {}
    sent(known, "a")
    failing = sent(known, "b")
    assert set(known.cached_tokens(PREFIX, 1000)) == {"a", "b"}
    assert 800 <= known.cached_tokens(PREFIX, 1000)["a"] <= 1000
    failing.note_failed()
    assert set(known.cached_tokens(PREFIX, 1000)) == {"a"}


def test_an_instance_that_had_cached_less_than_expected_has_evicted_what_is_older() -> None:
    known = CachedPrefixes(1000)
    older = prefix_of(chat("Where? " * 200))
    known.begin(older, Route(instance_id="a", node_id="n", region="east", utilization=0.0)).note_computed()
    first = sent(known, "a")
    first.note_computed()
    first.note_end(finished(0))
    assert len(known.cached_tokens(older, 1000)) == 1, "nothing was expected of the first request"
    again = sent(known, "a", expected=900)
    again.note_computed()
    again.note_end(finished(850))
    assert len(known.cached_tokens(older, 1000)) == 1
    missing = sent(known, "a", expected=900)
    missing.note_computed()
    missing.note_end(finished(100))
    assert known.cached_tokens(PREFIX, 1000)["a"] > 800, "it has just been computed again"
    assert known.cached_tokens(older, 1000).get("a", 0) < 500, "the system message at most"


def test_a_request_beside_the_first_says_nothing_of_eviction() -> None:
    known = CachedPrefixes(1000)
    sent(known, "a")
    beside = sent(known, "a", expected=900)
    beside.note_computed()
    beside.note_end(finished(0))
    assert "a" in known.cached_tokens(PREFIX, 1000), "the first was not computed yet"


@pytest.mark.parametrize("after", [view("2"), view(state="loading"), view(state="failed")])
def test_an_instance_that_restarted_has_nothing(after: FleetView) -> None:
    known = CachedPrefixes(1000)
    known.follow(view())
    sent(known, "a").note_computed()
    known.follow(view())
    assert "a" in known.cached_tokens(PREFIX, 1000)
    known.follow(after)
    assert known.cached_tokens(PREFIX, 1000) == {}


def test_an_instance_that_left_and_returned_has_nothing() -> None:
    known = CachedPrefixes(1000)
    known.follow(view())
    sent(known, "a").note_computed()
    known.follow(view(instance="b"))
    known.follow(view())
    assert known.cached_tokens(PREFIX, 1000) == {}
