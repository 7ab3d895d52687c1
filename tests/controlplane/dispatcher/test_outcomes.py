"""What is noted of the dispatcher's loops."""

from controlplane.dispatcher.outcomes import Outcomes


def test_a_loop_that_fails_is_named_until_it_succeeds() -> None:
    outcomes = Outcomes()
    for what in ("validated", "release"):
        outcomes.begin(what, 0.0)
    assert outcomes.trouble(1.0) is None
    assert outcomes.end("release", 1.0, OSError("gone\nfar")), "it was well before"
    assert not outcomes.end("release", 2.0, OSError("gone")), "it is no news"
    assert outcomes.trouble(2.0) == "release: OSError: gone"
    assert outcomes.end("release", 3.0)
    assert not outcomes.end("release", 4.0)
    assert outcomes.trouble(4.0) is None


def test_a_loop_that_hangs_is_named() -> None:
    outcomes = Outcomes()
    for what in ("validated", "release"):
        outcomes.begin(what, 0.0)
    outcomes.end("release", 700.0)
    assert outcomes.trouble(701.0) == "validated: no run has ended for 600 s"
