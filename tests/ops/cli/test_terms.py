"""`tidepool term`, and where else the term is told."""

from controlplane.store.session import Database
from controlplane.store.terms import note_reported
from tests.ops.cli.running import Run


def test_a_newer_term_of_nodes_is_told_and_raised_above(served: Run, database: Database) -> None:
    assert served("term", "show", "--json").json["term"] == 1
    with database.transaction() as session:
        note_reported(session, 4)
    shown = served("term", "show").out.split()
    assert shown[shown.index("term") + 1] == "1"
    assert shown[shown.index("nodes") + 1] == "4"
    assert "nodes have seen term 4, this primary is in 1" in served("status").out
    raised = served("term", "raise")
    assert "term 5 begins" in raised.out
    after = served("status").out
    assert "nodes have seen" not in after
    [event] = served("events", "--kind", "term", "--json").json["data"]
    assert (event["subject"], event["what"]) == ("5", "began")
    assert event["message"].startswith("raised by admin; written by ")
