"""What is kept of the past: `tidepool audit`, `events`, `usage` and `request`."""

from datetime import UTC, datetime, timedelta
from typing import Any

from controlplane.store.request_log import RequestRecord, write_requests
from controlplane.store.session import Database
from controlplane.store.usage import Usage, UsageKey, put_usage
from tests.ops.cli.running import Run, join


def test_the_audit_is_filtered(served: Run) -> None:
    served("region", "add", "us-east")
    served("region", "add", "us-west")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    served("region", "add", "us-east", "--position", 7)

    def subjects(*options: object) -> list[str]:
        return [row["subject"] for row in served("audit", *options, "--json").json["data"]]

    assert subjects() == ["us-east", "H800", "us-west", "us-east"]
    assert subjects("--kind", "region") == ["us-east", "us-west", "us-east"]
    assert subjects("--subject", "us-west", "--actor", "admin", "--since", "1h") == ["us-west"]
    assert subjects("--limit", 2) == ["us-east", "H800"]
    assert subjects("--actor", "nobody") == subjects("--since", "2999-01-01") == []
    shown = served("audit", "--kind", "region", "--limit", 1).out
    assert "region.put" in shown
    assert "position 0 -> 7" in shown
    for wrong in ("noon", "2hours", "yesterday"):
        refused = served("audit", "--since", wrong)
        assert (refused.status, "nor how long ago, 2h" in refused.err.replace("\n", " ")) == (2, True), refused.err


def test_events_tell_what_became_of_nodes(served: Run, database: Database) -> None:
    served("region", "add", "us-east")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    for name in ("n-1", "n-2"):
        join(database, name)
    served("node", "drain", "n-1")

    def what(*options: object) -> list[str]:
        return [f"{row['subject']} {row['what']}" for row in served("events", *options, "--json").json["data"]]

    assert what() == ["n-1 draining", "n-2 joined", "n-1 joined"]
    assert what("--node", "n-1", "--what", "joined") == ["n-1 joined"]
    assert what("--kind", "plan") == what("--since", "2999-01-01") == []
    assert "H800 at http://127.0.0.1:1" in served("events", "--subject", "n-2").out


def test_usage_is_added_up(served: Run, database: Database) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    with database.transaction() as session:
        counts = {
            UsageKey(hour - timedelta(hours=back), tenant, "m", "IW-N"): Usage(requests=1000, output_tokens=back)
            for back in range(3)
            for tenant in ("acme", "blue")
        }
        put_usage(session, "x", counts)
    rows = served("usage", "--by", "tenant", "--json").json["data"]
    assert [(row["tenant"], row["requests"], row["output_tokens"]) for row in rows] == [
        ("acme", 3000, 3),
        ("blue", 3000, 3),
    ]
    assert len(served("usage", "--by", "hour", "--tenant", "acme", "--limit", 2, "--json").json["data"]) == 2
    shown = served("usage", "--since", "1d", "--by", "hour", "--by", "tenant").out
    assert f"{hour:%Y-%m-%d %H:%M}" in shown
    assert "1,000" in shown
    assert served("usage", "--since", "2999-01-01").out == "Usage: none\n"


def test_requests(served: Run, database: Database) -> None:
    with database.transaction() as session:
        write_requests(session, [logged("req_a"), logged("req_b", outcome="no_capacity", status=503, nodes=[])])
    shown = served("request", "show", "req_a")
    assert (shown.status, shown.err) == (0, "")
    for words in ("ok (200)", "n1, n2", "acme", "0.250 s", "/v1/completions"):
        assert words in shown.out
    assert served("request", "show", "req_b", "--json").json["data"][0]["outcome"] == "no_capacity"
    listed = served("request", "list", "--since", "1h")
    assert listed.out.index("req_b") < listed.out.index("req_a")
    failed = served("request", "list", "--outcome", "failed", "--tenant", "acme", "--json").json
    assert [row["request_id"] for row in failed["data"]] == ["req_b"]
    assert "only the newest 1" in served("request", "list", "--limit", 1).out
    assert served("request", "list", "--model", "none").out == "Requests: none\n"
    unknown = served("request", "show", "req_c")
    assert unknown.status == 1
    assert "no request 'req_c' is in the log, which goes back 24 hours" in unknown.err
    assert served("request", "list", "--since", "soon").status == 2


def logged(request_id: str, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "ended_at": datetime.now(UTC),
        "endpoint": "/v1/completions",
        "tenant": "acme",
        "model": "tide",
        "outcome": "ok",
        "nodes": ["n1", "n2"],
        "first_token_s": 0.25,
    }
    return RequestRecord(request_id=request_id, **(values | changes))
