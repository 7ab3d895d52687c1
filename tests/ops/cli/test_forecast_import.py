"""`tidepool forecast import`: into a file without an API, and into the API."""

import gzip
import os
from pathlib import Path
from typing import get_args

import pytest

from forecasts.importers.formats import FORMATS
from ops.cli.forecast_import import Format
from tests.ops.cli.running import Run

DATA = Path(os.environ.get("TIDEPOOL_DATA", Path(__file__).parents[4] / "shared" / "data"))
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
SERVEGEN = "model,t_s,rps_all_clients,rps_clients_with_length_data,input_tps_covered\n"


@pytest.fixture
def burstgpt(tmp_path: Path) -> Path:
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT + "5,ChatGPT,60,1,61,x\n100,GPT-4,120,1,121,x\n")
    return path


def test_help_names_every_format_on_a_line_of_its_own(run: Run) -> None:
    help_lines = run("forecast", "import", "--help").out.splitlines()
    assert list(get_args(Format)) == list(FORMATS)
    for name in FORMATS:
        assert sum(line.split()[:1] == [name] for line in help_lines) == 1, name


def test_a_file_is_written_without_an_api(run: Run, burstgpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "demand.csv"
    outcome = run("forecast", "import", "burstgpt", burstgpt, "--out", out, "--start", "2024-11-14", "--region", "us")
    assert (outcome.status, outcome.out) == (
        0,
        f"{out}: 3 rows of 2 series, 0 gaps, 2024-11-14 00:00:00Z to 2024-11-14 00:01:00Z\n",
    )
    assert out.read_text().splitlines() == [
        *("start_s,region,model,tokens_per_s", "1731542400,us,ChatGPT,1.0", "1731542460,us,ChatGPT,0.0"),
        "1731542460,us,GPT-4,2.0",
    ]


def test_what_was_written_is_read_again_as_it_is_gaps_included(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "rates.csv"
    source.write_text(SERVEGEN + "m,0,4,1,100\nm,600,0,0,0\nm,1200,2,1,100\n")
    first, second = tmp_path / "a.csv.gz", tmp_path / "b.csv"
    summary = run("forecast", "import", "servegen", source, "--out", first, "--start", 0, "--json").json
    assert summary == {
        "format": "servegen",
        "out": str(first),
        "rows": 3,
        "gaps": 1,
        "series": 1,
        "first_s": 0.0,
        "last_s": 1200.0,
    }
    assert run("forecast", "import", "csv", first, "--out", second).status == 0
    assert second.read_text() == gzip.decompress(first.read_bytes()).decode()
    assert "600,all,m,\n" in second.read_text()


def test_the_api_gets_minutes(fleet: Run, tmp_path: Path) -> None:
    source = tmp_path / "rates.csv"
    source.write_text(SERVEGEN + "m,0,4,1,100\nm,600,0,0,0\nm,1200,2,1,100\n")
    sent = fleet("forecast", "import", "servegen", source, "--start", "0", "--region", "us-east", "--kind", "NIW")
    assert "20 minutes of 1 endpoints are imported" in sent.out
    shown = fleet("demand", "show", "m", "us-east", "--kind", "NIW", "--json").json["data"]
    assert [point["start_s"] for point in shown] == [*range(0, 600, 60), *range(1200, 1800, 60)]
    assert {point["tokens_per_s"] for point in shown} == {400.0, 200.0}
    source.write_text(SERVEGEN + "m,0,4,1,100\nm,600,x,0,0\n")
    refused = fleet("forecast", "import", "servegen", source, "--region", "us-east")
    assert refused.err.endswith("line 3: column rps_all_clients is no number: 'x'\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--start", "soon"), "--start: neither Unix seconds nor a time like 2024-11-11 00:00: 'soon'"),
        (("--start", "2024-11-11 00:00:30"), "--start: must be a Unix time of a whole minute, got 1731283230"),
        (("--model", "m"), "--model: does not apply to this format"),
        (("--region", "a", "--region", "b"), "--region: this format takes one, got 2"),
        (("--kind", "IW"), "--kind is for the API"),
    ],
)
def test_options_that_cannot_be_meant_are_named(
    run: Run, burstgpt: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    outcome = run("forecast", "import", "burstgpt", burstgpt, "--out", tmp_path / "x.csv", *arguments)
    assert (outcome.status, outcome.out) == (1, "")
    assert message in outcome.err
    assert not (tmp_path / "x.csv").exists()


def test_a_bad_line_leaves_the_old_file_and_no_other(run: Run, burstgpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "demand.csv"
    out.write_text("old")
    burstgpt.write_text(burstgpt.read_text() + "oops,m,1,1,2,x\n")
    outcome = run("forecast", "import", "burstgpt", burstgpt, "--out", out)
    assert outcome.status == 1
    assert outcome.err.endswith(f"error: {burstgpt}: line 4: column Timestamp is no number: 'oops'\n")
    assert {path.name for path in tmp_path.iterdir()} == {"burst.csv", "demand.csv"}
    assert out.read_text() == "old"


def test_where_it_cannot_be_written_is_said(run: Run, burstgpt: Path, tmp_path: Path) -> None:
    assert "is the file to read" in run("forecast", "import", "burstgpt", burstgpt, "--out", burstgpt).err
    none = tmp_path / "none" / "x.csv"
    assert "cannot be written: No such file" in run("forecast", "import", "burstgpt", burstgpt, "--out", none).err
    burstgpt.write_text(BURSTGPT)
    outcome = run("forecast", "import", "burstgpt", burstgpt, "--out", tmp_path / "x.csv")
    assert "holds no demand: nothing after the header" in outcome.err
    assert run("forecast", "import", "frob", burstgpt).status == 2
    assert run("forecast", "import", "csv", tmp_path / "none.csv").status == 2


@pytest.mark.skipif(not (DATA / "sageserve").is_dir(), reason=f"no recorded demand in {DATA}")
def test_a_recorded_week(run: Run, tmp_path: Path) -> None:
    source = DATA / "sageserve" / "nov2024_week_prompt_tokens_per_min.csv.gz"
    summary = run("forecast", "import", "sageserve", source, "--out", tmp_path / "week.csv", "--json").json
    assert (summary["rows"], summary["series"], summary["gaps"]) == (20_160, 2, 0)
    assert len((tmp_path / "week.csv").read_text().splitlines()) == 20_161
