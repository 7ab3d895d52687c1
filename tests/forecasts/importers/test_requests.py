import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasts.importers.lines import DemandFileError
from forecasts.importers.requests import read_azure_requests, read_burstgpt, read_mooncake
from forecasts.importers.settings import ImportSettings

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
ZERO = ImportSettings(start_s=0)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure_requests_are_summed_by_minute(tmp_path: Path) -> None:
    times = ["18:17:03.9799600,4808,10", "18:17:59.9,12,1", "18:19:00,60,1"]
    path = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 {t}\n" for t in times))
    rows = list(read_azure_requests(path, ImportSettings(regions=("us",), model="code")))
    assert [(row.start_s - 1_700_158_620, row.tokens_per_s) for row in rows] == [(0, 4820 / 60), (60, 0), (120, 1)]
    assert {(row.region, row.model) for row in rows} == {("us", "code")}


def test_burstgpt_models_are_apart_and_failures_count(tmp_path: Path) -> None:
    """A model begins with its first request and lasts to the end of the trace; a silent minute is a zero."""
    lines = ["5,ChatGPT,60,18,78,Conversation log", "130,GPT-4,120,0,120,API log", "200.5,ChatGPT,30,1,31,API log"]
    rows = list(read_burstgpt(written(tmp_path, BURSTGPT + "\n".join(lines)), ZERO))
    assert [(row.model, row.start_s, row.tokens_per_s) for row in rows] == [
        *(("ChatGPT", 0, 1), ("ChatGPT", 60, 0), ("ChatGPT", 120, 0), ("ChatGPT", 180, 0.5)),
        *(("GPT-4", 120, 2), ("GPT-4", 180, 0)),
    ]
    wider = BURSTGPT.replace("Timestamp,", "Timestamp,Session ID,Elapsed time,") + "5,s,1.5,GPT-4,60,1,61,API log\n"
    assert [row.tokens_per_s for row in read_burstgpt(written(tmp_path, wider), ZERO)] == [1]


def test_mooncake_counts_milliseconds(tmp_path: Path) -> None:
    requests = [
        {"timestamp": ms, "input_length": 60, "output_length": 1, "hash_ids": [1]} for ms in (0, 59_999, 60_000)
    ]
    path = written(tmp_path, "\n".join(map(json.dumps, requests)))
    rows = list(read_mooncake(path, ImportSettings(start_s=120)))
    assert [(row.start_s, row.model, row.tokens_per_s) for row in rows] == [(120, "mooncake", 2), (180, "mooncake", 1)]


def test_a_stray_time_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT + "5,m,1,1,2,x\n9e9,m,1,1,2,x\n")
    with pytest.raises(DemandFileError, match="line 3: column Timestamp 9e9 is over 1098 days from other requests"):
        list(read_burstgpt(path, ZERO))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x,m,1,1,2,x", "line 2: column Timestamp is no number: 'x'"),
        ("-1,m,1,1,2,x", "line 2: column Timestamp must be finite and not negative"),
        ("1,,1,1,2,x", "line 2: column Model is empty"),
        ("1,m,,1,2,x", "line 2: column Request tokens is empty"),
        ("1,m,inf,1,2,x", "line 2: column Request tokens must be finite"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DemandFileError, match=message):
        list(read_burstgpt(written(tmp_path, BURSTGPT + line + "\n"), ZERO))


@given(st.lists(st.tuples(st.integers(0, 5_000), st.sampled_from("ab"), st.integers(0, 10**6)), min_size=1))
def test_no_token_is_lost_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[int, str, int]]
) -> None:
    text = BURSTGPT + "".join(f"{time_s},{model},{tokens},1,1,x\n" for time_s, model, tokens in requests)
    rows = list(read_burstgpt(written(tmp_path_factory.mktemp("trace"), text), ZERO))
    for name in {model for _, model, _ in requests}:
        counted = sum((row.tokens_per_s or 0.0) * 60 for row in rows if row.model == name)
        assert counted == pytest.approx(sum(tokens for _, model, tokens in requests if model == name))
    assert len({(row.model, row.start_s) for row in rows}) == len(rows)
