"""`tidepool api` with what it cannot do."""

import socket

import pytest

from tests.ops.cli.running import Run


@pytest.mark.parametrize(
    ("count", "limit"),
    [("0", "greater than or equal to 1"), ("-1", "greater than or equal to 1"), ("1000", "less than or equal to 64")],
)
def test_a_number_of_processes_has_limits(
    run: Run, monkeypatch: pytest.MonkeyPatch, restored_logs: None, count: str, limit: str
) -> None:
    by_option = run("api", "--processes", count)
    assert by_option.status != 0
    assert f"'--processes': Input should be {limit}" in by_option.err
    monkeypatch.setenv("TIDEPOOL_API_PROCESSES", count)
    by_setting = run("api")
    assert by_setting.status != 0
    assert f"setting TIDEPOOL_API_PROCESSES: Input should be {limit}" in by_setting.err


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_in_use_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, restored_logs: None, processes: int) -> None:
    monkeypatch.setenv("TIDEPOOL_DATABASE_URL", "postgresql+psycopg://x@127.0.0.1:1/x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("TIDEPOOL_PORT", str(port))
        outcome = run("api", "--processes", str(processes))
    assert outcome.status == 1
    assert f"TIDEPOOL_PORT: cannot listen at 127.0.0.1, port {port}: Address already in use" in outcome.err
    assert "Traceback" not in outcome.err
