"""All processes log in one format, at one level, and without secrets."""

import json
import subprocess
import sys
from typing import Any

import pytest

SECRET = "tp-client-Xy3q6rT0c1n2m3b4v5c6x7z8a9s0d1f2g3h4j5k6l7q8"
LOGS = f"""
import logging, sys, threading, warnings
import structlog
from dataplane.runtime.logs import LogSettings, logging_to_stderr
with logging_to_stderr(LogSettings()):
    for level in ("debug", "info", "warning", "error"):
        getattr(structlog.get_logger(), level)("ours " + level, secret="{SECRET}")
        getattr(logging.getLogger("library"), level)("theirs %s", level)
    warnings.warn("a warning of Python's")
    print("printed by a library, {SECRET}", file=sys.stderr)
    try:
        raise ValueError("http://me:word@host/\\n")
    except ValueError:
        structlog.get_logger().exception("caught")
    def fail():
        raise OSError("in a thread")
    thread = threading.Thread(target=fail, name="t")
    thread.start()
    thread.join()
    print("begun and not ended", end="", file=sys.stderr)
    raise RuntimeError("Bearer {SECRET}")
"""


def logged(code: str, **settings: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={f"TIDEPOOL_LOG_{name.upper()}": value for name, value in settings.items()},
    )
    return done.returncode, done.stderr


def test_each_line_is_json() -> None:
    status, text = logged(LOGS, format="json")
    assert status == 1
    assert SECRET not in text
    assert "word" not in text
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert all({"event", "level", "timestamp"} <= line.keys() for line in lines)
    assert [line["event"] for line in lines if line["event"].startswith(("ours", "theirs"))] == [
        "ours info",
        "ours warning",
        "theirs warning",
        "ours error",
        "theirs error",
    ]
    by_event = {line["event"]: line for line in lines}
    assert by_event["ours info"]["secret"] == "tp-client-***"
    assert by_event["theirs error"]["logger"] == "library"
    assert by_event["printed by a library, tp-client-***"]["logger"] == "stderr"
    assert by_event["begun and not ended"]["logger"] == "stderr"
    assert any("a warning of Python's" in event for event in by_event)
    assert "ValueError" in by_event["caught"]["exception"]
    assert by_event["uncaught error in a thread"]["thread"] == "t"
    assert "RuntimeError: Bearer ***" in lines[-1]["exception"]


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["ours debug", "ours info", "theirs info", "ours warning", "theirs warning"]),
        ("warning", ["ours warning", "theirs warning"]),
        ("error", []),
    ],
)
def test_the_level_is_kept(level: str, written: list[str]) -> None:
    _, text = logged(LOGS, level=level)
    assert SECRET not in text
    ours = [line for line in text.splitlines() if "ours " in line or "theirs " in line]
    assert len(ours) == len(written) + 2, "and the errors"
    assert all(what in line for what, line in zip(written, ours, strict=False))


def test_an_unknown_level_is_refused() -> None:
    code = "from ops.cli.main import main; main(['beat'])"
    status, text = logged(code, level="loud")
    assert status == 1
    assert text.startswith("error: setting TIDEPOOL_LOG_LEVEL: Input should be 'debug', 'info', 'warning' or 'error'")


def test_what_ends_a_process_is_json_too() -> None:
    code = "import os; os.environ['TIDEPOOL_PORT'] = 'x'; from ops.cli.main import main; main(['api'])"
    status, text = logged(code, format="json")
    assert status == 1
    (line,) = map(json.loads, text.splitlines())
    assert line["level"] == "critical"
    assert line["event"].startswith("setting TIDEPOOL_PORT: ")
