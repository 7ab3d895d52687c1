import pytest

from forecasts.importers.formats import FORMATS
from forecasts.importers.settings import ImportSettings


def test_what_was_not_given_has_its_default() -> None:
    settings = FORMATS["sageserve"].settings(start_s=600.0, regions=None, model=None, workload=None)
    assert settings == ImportSettings(start_s=600.0)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("csv", {"regions": ("us",)}, "regions: does not apply to this format"),
        ("azure-2023", {"start_s": 0.0}, "start_s: does not apply to this format"),
        ("burstgpt", {"model": "m"}, "model: does not apply to this format"),
        ("mooncake", {"regions": ("a", "b")}, "regions: this format takes one, got 2"),
        ("servegen", {"regions": ("a", "a")}, "regions: must be one or more different names"),
        ("servegen", {"regions": ("a", " ")}, "regions: a name must not be empty"),
        ("servegen", {"tokens_per_request": float("nan")}, "tokens_per_request: must be above 0"),
        ("servegen", {"start_s": 30.0}, "start_s: must be a Unix time of a whole minute, got 30"),
        ("servegen", {"start_s": -60.0}, "start_s: must be a Unix time"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FORMATS[name].settings(**given)
