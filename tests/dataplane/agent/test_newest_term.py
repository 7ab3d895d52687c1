"""The newest term outlives its agent, and only an operator makes a node forget it."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dataplane.agent.newest_term import NewestTerm, forget_term
from dataplane.agent.node import Agent
from dataplane.protocol.errors import StaleTermError
from dataplane.protocol.messages import DesiredInstances
from tests.dataplane.replay_node import settings


def of_term(term: int) -> DesiredInstances:
    return DesiredInstances(generation=1, instances=(), term=term)


def test_a_restarted_agent_obeys_nobody_of_an_older_term(tmp_path: Path) -> None:
    folder = tmp_path / "nodes" / "n1"
    Agent(settings(state_dir=folder), "boot").apply(of_term(4))
    restarted = Agent(settings(state_dir=folder), "boot2")
    assert restarted.heartbeat().term == 4, "the first heartbeat says it already"
    with pytest.raises(StaleTermError, match="term 3 is older than 4"):
        restarted.apply(of_term(3))
    restarted.apply(of_term(5))
    assert Agent(settings(state_dir=folder), "boot3").term == 5
    assert [file.name for file in folder.iterdir()] == ["term"]


def test_an_operator_makes_it_forget(tmp_path: Path) -> None:
    forget_term(tmp_path)  # nothing is there yet
    NewestTerm(tmp_path).note(4)
    forget_term(tmp_path)
    agent = Agent(settings(state_dir=tmp_path), "boot")
    agent.apply(of_term(1))
    assert agent.term == 1


def test_without_a_folder_it_is_lost_with_the_process() -> None:
    Agent(settings(), "boot").apply(of_term(4))
    assert Agent(settings(), "boot2").term == 0


@pytest.mark.parametrize("content", ["", "four\n", "-4\n"])
def test_a_file_that_holds_no_term_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "term").write_text(content)
    with pytest.raises(OSError, match=rf"{tmp_path}/term holds no term; .* --forget-term"):
        NewestTerm(tmp_path)


def test_a_disk_that_refuses_is_logged_and_the_term_holds(tmp_path: Path) -> None:
    newest = NewestTerm(tmp_path)
    (tmp_path / "term.new").mkdir()
    with capture_logs() as logs:
        newest.note(4)
        newest.note(3)
    assert newest.value == 4
    assert [entry["event"] for entry in logs] == ["the newest term would not survive a restart"]
