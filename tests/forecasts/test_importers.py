import gzip
from pathlib import Path

import pytest

from forecasts.importers import DemandFileError, read_azure_week, read_demand_csv, read_sageserve_week
from forecasts.series import DemandRow

SAGESERVE = "minute,model,workload,prompt_tokens_per_min,vertex\n"


def written(folder: Path, text: str, name: str = "demand.csv") -> Path:
    path = folder / name
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_a_plain_csv_with_a_gap(tmp_path: Path) -> None:
    path = written(tmp_path, "model,start_s,region,tokens_per_s,note\na,60,west,12.5,x\na,120,west,,y\n")
    assert read_demand_csv(path) == [
        DemandRow(start_s=60, region="west", model="a", tokens_per_s=12.5),
        DemandRow(start_s=120, region="west", model="a", tokens_per_s=None),
    ]


def test_sageserve_minutes_become_tokens_per_second(tmp_path: Path) -> None:
    path = written(tmp_path, SAGESERVE + "0,A,prod,120.0,1\n0,A,dev,999.0,1\n1,A,prod,,0\n", "week.csv.gz")
    assert read_sageserve_week(path, start_s=600, region="us") == [
        DemandRow(start_s=600, region="us", model="A", tokens_per_s=2.0),
        DemandRow(start_s=660, region="us", model="A", tokens_per_s=None),
    ]
    assert [row.tokens_per_s for row in read_sageserve_week(path, workload="dev")] == [999 / 60]
    with pytest.raises(DemandFileError, match="no row says 'test'"):
        read_sageserve_week(path, workload="test")


def test_azure_counts_become_tokens_per_minute(tmp_path: Path) -> None:
    """Three requests in 10 s and one in 10 s are 0.2 a second; at 100 tokens, 20 tokens a second."""
    times = ["00:00:00,3", "00:00:10,1", "00:01:00,", "00:02:50,6"]
    path = written(tmp_path, "Time,TIMESTAMP\n" + "".join(f"2024-05-10 {line}\n" for line in times))
    start_s = 1_715_299_200.0
    rows = read_azure_week(path, region="us", model="code", input_tokens_mean=100)
    assert [(row.start_s - start_s, row.tokens_per_s) for row in rows] == [(0, 20.0), (60, None), (120, 60.0)]
    assert {(row.region, row.model) for row in rows} == {("us", "code")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start_s,region,model\n", "line 1: column tokens_per_s is missing; found: start_s, region, model"),
        ("", "line 1: column start_s is missing"),
        ("start_s,region,model,tokens_per_s\n0,w,a,1\nx,w,a,1\n", "line 3: column start_s is no number: 'x'"),
        ("start_s,region,model,tokens_per_s\n0,w,a,-1\n", r"line 2: column tokens_per_s must be .* is -1\.0"),
        ("start_s,region,model,tokens_per_s\n0,w,a,nan\n", "line 2: column tokens_per_s must be finite"),
        ("start_s,region,model,tokens_per_s\n0,,a,1\n", "line 2: column region is empty"),
        ("start_s,region,model,tokens_per_s\n0,w,a\n", "line 2: 3 columns, the header has 4"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DemandFileError, match=message) as caught:
        read_demand_csv(path)
    assert str(path) in str(caught.value)


def test_a_bad_time_or_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DemandFileError, match=r"line 2: column Time is no time like .* 'noon'"):
        read_azure_week(written(tmp_path, "Time,TIMESTAMP\nnoon,1\n"))
    (tmp_path / "plain.csv.gz").write_bytes(b"Time,TIMESTAMP\n")
    with pytest.raises(DemandFileError, match=r"plain\.csv\.gz"):
        read_azure_week(tmp_path / "plain.csv.gz")
    with pytest.raises(DemandFileError, match=r"none\.csv"):
        read_demand_csv(tmp_path / "none.csv")
