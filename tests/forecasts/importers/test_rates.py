import gzip
from pathlib import Path

import pytest

from forecasts.importers.lines import DemandFileError
from forecasts.importers.rates import read_azure_week, read_demand_csv, read_sageserve_week, read_servegen
from forecasts.importers.settings import MONDAY_S, ImportSettings
from forecasts.series import DemandRow

SAGESERVE = "minute,model,workload,prompt_tokens_per_min,vertex\n"
SERVEGEN = "category,model,t_s,rps_all_clients,rps_clients_with_length_data,input_tps_covered\n"
CLIENTS = "client_chunk,timestamp_s,rate_rps,cv\n"


def written(folder: Path, text: str, name: str = "demand.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_a_plain_csv_with_a_gap(tmp_path: Path) -> None:
    path = written(tmp_path, "model,start_s,region,tokens_per_s,note\na,60,west,12.5,x\na,120,west,,y\n")
    assert list(read_demand_csv(path)) == [
        DemandRow(start_s=60, region="west", model="a", tokens_per_s=12.5),
        DemandRow(start_s=120, region="west", model="a", tokens_per_s=None),
    ]


def test_sageserve_minutes_become_tokens_per_second(tmp_path: Path) -> None:
    path = written(tmp_path, SAGESERVE + "0,A,prod,120.0,1\n0,A,dev,999.0,1\n1,A,prod,,0\n", "week.csv.gz")
    assert list(read_sageserve_week(path, ImportSettings(start_s=600, regions=("us",)))) == [
        DemandRow(start_s=600, region="us", model="A", tokens_per_s=2.0),
        DemandRow(start_s=660, region="us", model="A", tokens_per_s=None),
    ]
    dev = list(read_sageserve_week(path, ImportSettings(workload="dev")))
    assert [(row.start_s, row.tokens_per_s) for row in dev] == [(MONDAY_S, 999 / 60)]
    with pytest.raises(DemandFileError, match="no row has 'test'; found: dev, prod"):
        list(read_sageserve_week(path, ImportSettings(workload="test")))


def test_azure_counts_become_tokens_per_minute(tmp_path: Path) -> None:
    """Three requests in 10 s and one in 10 s are 0.2 a second; at 100 tokens, 20 tokens a second."""
    times = ["00:00:00,3", "00:00:10,1", "00:01:00,", "00:02:50,6"]
    path = written(tmp_path, "Time,TIMESTAMP\n" + "".join(f"2024-05-10 {line}\n" for line in times))
    start_s = 1_715_299_200.0
    rows = list(read_azure_week(path, ImportSettings(regions=("us",), model="code", tokens_per_request=100)))
    assert [(row.start_s - start_s, row.tokens_per_s) for row in rows] == [(0, 20.0), (60, None), (120, 60.0)]
    assert {(row.region, row.model) for row in rows} == {("us", "code")}


def test_azure_2024_as_published_has_a_line_for_each_request(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,600,5\n"
    (row,) = read_azure_week(written(tmp_path, text))
    assert row == DemandRow(start_s=1_715_299_200, region="all", model="coding", tokens_per_s=10.0)


def test_servegen_models_have_the_mean_length_of_the_known_clients(tmp_path: Path) -> None:
    """300 tokens of 2 requests a second are 150 each, whichever clients are known just then."""
    lines = ["x,m,0,4,1,100", "x,m,600,2,1,200", "x,m,1200,0,0,0", "x,m,1800,6,0,0"]
    path = written(tmp_path, SERVEGEN + "\n".join(lines) + "\n")
    rows = list(read_servegen(path, ImportSettings(start_s=0)))
    assert [(row.start_s, row.tokens_per_s) for row in rows] == [(0, 600), (600, 300), (1200, None), (1800, 900)]
    rows = list(read_servegen(path, ImportSettings(start_s=0, tokens_per_request=10)))
    assert [row.tokens_per_s for row in rows] == [40, 20, None, 60]
    unknown = written(tmp_path, SERVEGEN + "x,m,0,4,0,0\n")
    with pytest.raises(DemandFileError, match="m has no lengths at all"):
        list(read_servegen(unknown))
    with pytest.raises(DemandFileError, match="whole models"):
        list(read_servegen(path, ImportSettings(regions=("a", "b"))))


def test_servegen_clients_are_dealt_out_and_a_gap_is_where_all_are_silent(tmp_path: Path) -> None:
    """Client 8 goes to a, 3 to b, 5 to a. At 600 only b is silent, which is no gap; at 1200 all are."""
    rates = {8: (1, 2, 0), 3: (4, 0, 0), 5: (0, 8, 0)}
    lines = [f"{client},{600 * i},{rate},1" for client, each in rates.items() for i, rate in enumerate(each)]
    path = written(tmp_path, CLIENTS + "\n".join(lines) + "\n")
    settings = ImportSettings(start_s=0, regions=("a", "b"), tokens_per_request=10, model="m")
    assert [(row.region, row.start_s, row.tokens_per_s) for row in read_servegen(path, settings)] == [
        *(("a", 0, 10), ("a", 600, 100), ("a", 1200, None)),
        *(("b", 0, 40), ("b", 600, 0), ("b", 1200, None)),
    ]
    with pytest.raises(DemandFileError, match="tokens_per_request is needed"):
        list(read_servegen(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start_s,region,model\n", "line 1: column tokens_per_s is missing; found: start_s, region, model"),
        ("", "line 1: column start_s is missing"),
        ("start_s,region,model,tokens_per_s\n0,w,a,1\nx,w,a,1\n", "line 3: column start_s is no number: 'x'"),
        ("start_s,region,model,tokens_per_s\n0,w,a,-1\n", r"line 2: column tokens_per_s must be .* is -1\.0"),
        ("start_s,region,model,tokens_per_s\n0,w,a,nan\n", "line 2: column tokens_per_s must be finite"),
        ("start_s,region,model,tokens_per_s\n-60,w,a,1\n", "line 2: column start_s must be a Unix time"),
        ("start_s,region,model,tokens_per_s\n0,,a,1\n", "line 2: column region is empty"),
        ("start_s,region,model,tokens_per_s\n0,w,a\n", "line 2: 3 columns, the header has 4"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DemandFileError, match=message) as caught:
        list(read_demand_csv(path))
    assert str(path) in str(caught.value)


def test_a_bad_time_is_named(tmp_path: Path) -> None:
    with pytest.raises(DemandFileError, match=r"line 2: column Time is no time like .* 'noon'"):
        list(read_azure_week(written(tmp_path, "Time,TIMESTAMP\nnoon,1\n")))
