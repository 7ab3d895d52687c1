"""The public recordings, in TIDEPOOL_DATA or beside the repository: nothing of them is lost or made up."""

import csv
import gzip
import os
from pathlib import Path

import pytest

from forecasts.importers.formats import FORMATS
from forecasts.importers.lines import no_progress
from forecasts.series import DemandRow

DATA = Path(os.environ.get("TIDEPOOL_DATA", Path(__file__).resolve().parents[3].parent / "shared" / "data"))
WEEK_S = 7 * 86_400

pytestmark = pytest.mark.skipif(not (DATA / "servegen").is_dir(), reason=f"no recorded demand in {DATA}")


def read(name: str, file: str, **given: object) -> list[DemandRow]:
    return list(FORMATS[name].read(DATA / file, FORMATS[name].settings(**given), no_progress))


def tokens(rows: list[DemandRow], bucket_s: float = 60.0) -> float:
    return sum((row.tokens_per_s or 0.0) * bucket_s for row in rows)


def test_azure_2023() -> None:
    file = "azure/AzureLLMInferenceTrace_code_2023.csv.gz"
    with gzip.open(DATA / file, "rt", newline="") as text:
        expected = sum(int(line["ContextTokens"]) for line in csv.DictReader(text))
    rows = read("azure-2023", file)
    assert tokens(rows) == pytest.approx(expected)
    assert len(rows) == 58  # 18:17 to 19:14


def test_azure_2024() -> None:
    rows = read("azure-2024", "azure/azure2024_week_requests_10s_Coding.csv.gz")
    assert len(rows) == WEEK_S / 60 + 1  # the file ends with the first 10 s of the eighth day
    assert tokens(rows) == pytest.approx(16.8e6 * 2560, rel=0.01)


def test_sageserve() -> None:
    rows = read("sageserve", "sageserve/nov2024_week_prompt_tokens_per_min.csv.gz")
    assert {row.model for row in rows} == {"A", "C"}
    assert len(rows) == 2 * WEEK_S / 60


def test_servegen() -> None:
    models = read("servegen", "servegen/rates_10min.csv.gz")
    assert {
        name: sum(row.tokens_per_s is None for row in models if row.model == name) for name in ("m-small", "m-mid")
    } == {
        "m-small": 37,
        "m-mid": 84,
    }
    file = "servegen/m-small_clients.csv.gz"
    one = read("servegen", file, tokens_per_request=100.0)
    two = read("servegen", file, tokens_per_request=100.0, regions=("east", "west"))
    assert sum(row.tokens_per_s is None for row in one) == 37
    assert tokens(two) == pytest.approx(tokens(one))
    assert all(tokens([row for row in two if row.region == region]) > 0 for region in ("east", "west"))


def test_mooncake() -> None:
    rows = read("mooncake", "mooncake/synthetic_trace.jsonl.gz")
    assert len(rows) == 18
    assert tokens(rows) == pytest.approx(61_194_628)
