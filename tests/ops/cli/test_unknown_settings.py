"""A variable with our prefix that nobody reads is named, with what was probably meant."""

from ops.cli.unknown_settings import unknown_settings


def test_known_names_pass() -> None:
    names = ["PATH", "TIDEPOOL_PORT", "TIDEPOOL_AGENT_NODE", "TIDEPOOL_KEY", "TIDEPOOL_TEST_REDIS_URL", "TIDEPOOLS"]
    assert unknown_settings(names) == []


def test_a_removed_or_misspelt_setting_is_named() -> None:
    assert unknown_settings(["TIDEPOOL_PLAN_APROVAL", "TIDEPOOL_SCALE_STRATEGIE", "TIDEPOOL_AGENT_SLOT"]) == [
        "TIDEPOOL_AGENT_SLOT is no setting; did you mean TIDEPOOL_AGENT_SLOTS?",
        "TIDEPOOL_PLAN_APROVAL is no setting; did you mean TIDEPOOL_PLAN_APPROVAL?",
        "TIDEPOOL_SCALE_STRATEGIE is no setting; did you mean TIDEPOOL_SCALE_STRATEGY?",
    ]
