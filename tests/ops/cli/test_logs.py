"""`logs`: the files of a stack on this machine."""

from pathlib import Path

import pytest

from ops.cli import logs
from ops.cli.main import main


def run(home: Path, *arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["logs", "--home", str(home), *arguments])
    assert ended.value.code in {0, None}, arguments


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "api.log").write_text("a1\na2\na3\n")
    (folder / "agent-us-east-1.log").write_text("e1\n")
    (folder / "agent-us-west-1.log").write_bytes(b"w\xff1\n")
    return tmp_path


def test_the_last_lines_of_each_process(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(home, "api", "-n", "2")
    assert capsys.readouterr().out == "a2\na3\n", "one process needs no name before its lines"
    run(home, "agent")
    assert capsys.readouterr().out == "agent-us-east-1 | e1\nagent-us-west-1 | w\ufffd1\n"
    run(home)
    assert "api             | a3" in capsys.readouterr().out


def test_where_no_logs_are_it_says_where_they_go(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for at, arguments, words in ((home, ["beat"], "those are agent-us-east-1"), (tmp_path / "x", [], "journalctl")):
        with pytest.raises(SystemExit) as ended:
            main(["logs", "--home", str(at), *arguments])
        assert ended.value.code == 1
        assert words in capsys.readouterr().err


def test_following_shows_new_lines_new_files_and_logs_begun_anew(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "logs"

    def begin_anew() -> None:
        (folder / "api.log").replace(folder / "api.log.1")
        (folder / "api.log").write_text("b1\n")

    def write(text: str) -> None:
        with (folder / "api.log").open("a") as log:
            log.write(text)

    steps = iter(
        [
            lambda: write("a4\nhal"),
            lambda: write("f\n"),
            begin_anew,
            lambda: (folder / "api-2.log").write_text("c1\n"),
        ]
    )

    def step(_: float) -> None:
        act = next(steps, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    monkeypatch.setattr(logs, "sleep", step)
    run(home, "ap", "-f", "-n", "1")
    assert [line.split("| ")[-1] for line in capsys.readouterr().out.splitlines()] == ["a3", "a4", "half", "b1", "c1"]
