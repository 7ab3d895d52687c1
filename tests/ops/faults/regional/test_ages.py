"""The age that a gateway tells is compared with what its copy lacks."""

from dataclasses import replace

from ops.faults.regional.ages import Marks, Told, too_young

TOLD = Told(region="north", at_s=100.0, age_s=3.0, behind=False, away=False, true_age_s=2.0)


def test_an_age_that_is_too_low_is_found() -> None:
    assert too_young([TOLD, replace(TOLD, age_s=2.0), replace(TOLD, age_s=1.95)]) == [], "readyz rounds to 0.1 s"
    found = too_young([TOLD, replace(TOLD, age_s=1.0)])
    assert found == ["north: told an age of 1 s, and it was 2.0 s at least"]


def test_a_gateway_or_a_copy_that_says_nothing_says_nothing_wrong() -> None:
    assert too_young([replace(TOLD, age_s=None), replace(TOLD, true_age_s=None)]) == []


def test_a_copy_is_as_old_as_the_first_mark_that_it_lacks() -> None:
    marks = Marks("postgresql+psycopg://127.0.0.1:1/none")
    marks.acknowledged = [(1, 10.0), (2, 12.0), (3, 14.0)]
    assert marks.age_s(1, 20.0) == 8.0
    assert marks.age_s(3, 20.0) == 0.0, "nothing is known that it lacks"
    assert marks.age_s(0, 9.0) == 0.0, "what it lacks was acknowledged later"
