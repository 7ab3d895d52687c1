"""What was sent to instances since their reports: sums by instance, and what other processes are told of them."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controlplane.serving.in_flight_tokens import Sending, SentTokens
from controlplane.store.redis.live import Sums

NAMES = st.sampled_from(("i1", "i2"))
ACTS = st.lists(st.tuples(st.sampled_from(("add", "take back", "ask")), NAMES, st.integers(1, 50)), max_size=30)


def test_what_others_take_back_after_a_report_counts_as_nothing() -> None:
    sent = SentTokens()
    sent.add_elsewhere("i1", Sending(5.0, Sums(-10, -4, -1)))
    assert sent.of("i1") == Sums()
    sent.add_elsewhere("i1", Sending(6.0, Sums(12, 8, 2)))
    assert sent.of("i1") == Sums(2, 4, 1)
    sent.forget({"i1": 5.0})
    assert sent.of("i1") == Sums(12, 8, 2), "each counts until it is reported, in whatever order they came"
    sent.add_elsewhere("i1", Sending(5.5, Sums(1, 1, 1)))
    sent.forget({"i1": 5.7})
    assert sent.of("i1") == Sums(12, 8, 2)


def test_what_others_take_back_takes_nothing_from_what_was_sent_here() -> None:
    sent = SentTokens()
    sending = sent.add("i1", 7, 5)
    sent.add_elsewhere("i1", Sending(sending.sent_s, Sums(-10, -4, -1)))
    assert sent.of("i1") == Sums(7, 5, 1)
    sent.add_elsewhere("i1", Sending(sending.sent_s, Sums(12, 8, 2)))
    assert sent.of("i1") == Sums(9, 9, 2)
    sent.take_back("i1", sending)
    assert sent.of("i1") == Sums(2, 4, 1)
    sent.forget({"i1": sending.sent_s})
    assert sent.of("i1") == Sums()


def test_others_are_not_told_of_instances_that_are_gone() -> None:
    sent = SentTokens()
    sent.add("i1", 3, 1)
    sent.add("gone", 3, 1)
    sent.forget({"i1": -math.inf})
    assert sent.untold() == {"i1": Sums(3, 1, 1)}
    assert sent.is_busy(60)
    assert not SentTokens().is_busy(60)


@given(ACTS)
def test_others_are_told_once_of_each_request(acts: list[tuple[str, str, int]]) -> None:
    """The sums of what they were told are those of what counts here."""
    sent, open_sendings = SentTokens(), dict[str, list[Sending]]()
    told, true = Counter[str](), Counter[str]()
    for act, name, tokens in acts:
        if act == "add":
            open_sendings.setdefault(name, []).append(sent.add(name, tokens, tokens // 2))
            true[name] += tokens
        elif act == "take back" and open_sendings.get(name):
            sending = open_sendings[name].pop()
            sent.take_back(name, sending)
            sent.take_back(name, sending)
            true[name] -= sending.sums.tokens
        else:
            told.update({name: sums.tokens for name, sums in sent.untold().items()})
    told.update({name: sums.tokens for name, sums in sent.untold().items()})
    for name in ("i1", "i2"):
        assert told[name] == true[name] == sent.of(name).tokens
        assert sent.of(name).requests == len(open_sendings.get(name, []))
