"""Recordings as traffic: what comes of a line of each format, scaled, sliced, dealt out, the same for the same seed."""

import gzip
import json
import math
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from forecasts.importers.lines import DemandFileError
from ops.simulator.kernel.requests import Request
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.traffic.traffic_parts import Lengths, MixedPart

DATA = Path(os.environ.get("TIDEPOOL_DATA", Path(__file__).resolve().parents[5] / "shared" / "data"))
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
COUNTS = "Time,TIMESTAMP\n"
SAGESERVE = "minute,model,workload,prompt_tokens_per_min\n"
CLIENTS = "client_chunk,timestamp_s,rate_rps,cv,arrival_pattern,param1,param2\n"
DEMAND = "start_s,region,model,tokens_per_s\n"


def scenario(kind: str, path: Path, **traffic: Any) -> Scenario:
    models = [{"name": name, "weights_bytes": 1, "kv_bytes_per_token": 1} for name in ("a", "b")]
    fleet = {
        "serving": "dedicated",
        "profile": "h800.toml",
        "kv_bytes": 1,
        "instances": [{"model": "a", "region": "east"}],
    }
    return Scenario.model_validate(
        {
            "name": "x",
            "regions": ["east", "west"],
            "models": models,
            "fleet": fleet,
            "traffic": {"kind": kind, "path": path, **traffic},
        }
    )


def requests(kind: str, path: Path, seed: int = 1, **traffic: Any) -> list[Request]:
    found = list(traffic_of(scenario(kind, path, **traffic), seed))
    assert [request.number for request in found] == list(range(len(found)))
    assert all(before.arrived_s <= after.arrived_s for before, after in pairwise(found))
    return found


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_azure_2023(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    lines = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.4799600,3180,0\n"
    path.write_bytes(gzip.compress((AZURE + lines).encode()))
    first, second = requests("azure-2023", path, models={"b": 1}, origins={"mars": 1}, tiers={"IW-F": 1})
    assert (first.arrived_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert (first.model, first.origin, first.tier) == ("b", "mars", "IW-F")
    assert second.arrived_s == pytest.approx(1.5)
    assert second.output_tokens == 1
    path.write_bytes(gzip.compress(f"{AZURE}2023-11-16,1,1\n2023-11-15,1,1\n".encode()))
    with pytest.raises(DemandFileError, match="line 3: column TIMESTAMP lies before"):
        requests("azure-2023", path)


def test_an_aegaeon_workload_by_name(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "workload,request_time,model_name,input_len,output_len\n"
        "one,00:00:00.418,synth_model_08,168,416\ntwo,00:01:03.071,synth_model_01,619,503\n",
    )
    (request,) = requests("aegaeon", path, workload="two")
    assert (request.arrived_s, request.model, request.tier) == (63.071, "synth_model_01", "IW-F")
    with pytest.raises(DemandFileError, match="has no workload three"):
        requests("aegaeon", path, workload="three")
    path.write_text(path.read_text() + "two,00:01:03.070,synth_model_01,1,1\n")
    with pytest.raises(DemandFileError, match="line 4: column request_time lies before the line above"):
        requests("aegaeon", path, workload="two")


def test_mooncake_and_burstgpt_name_their_models_or_not(tmp_path: Path) -> None:
    lines = [{"timestamp": ms, "input_length": 60, "output_length": 7, "hash_ids": [1]} for ms in (250, 59_999)]
    path = written(tmp_path, "\n".join(map(json.dumps, lines)))
    assert [(r.arrived_s, r.prompt_tokens, r.output_tokens) for r in requests("mooncake", path)] == [
        (0.25, 60, 7),
        (59.999, 60, 7),
    ]
    path = written(tmp_path, BURSTGPT + "5,b,60,18,78,x\n6,ChatGPT,6,0,6,x\n7,GPT-4,1,1,2,x\n8,ChatGPT,1,1,2,x\n")
    assert [(r.arrived_s, r.model, r.output_tokens) for r in requests("burstgpt", path)] == [
        *((5, "b", 18), (6, "a", 1), (7, "b", 1), (8, "a", 1))
    ]


def test_a_listing_is_sliced_and_scaled_within_its_shape(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT + "".join(f"{t},a,{t + 1},1,2,x\n" for t in range(1000)))
    found = requests("burstgpt", path, from_s=100.0, until_s=900.0, scale=2.5)
    assert len(found) == pytest.approx(2000, abs=100)
    assert all(math.floor(request.arrived_s) + 101 == request.prompt_tokens for request in found)
    assert max(found, key=lambda request: request.arrived_s).arrived_s < 800
    assert len(requests("burstgpt", path, scale=0.1)) == pytest.approx(100, abs=40)
    assert requests("burstgpt", path, scale=0.1, seed=2) == requests("burstgpt", path, scale=0.1, seed=2)
    assert requests("burstgpt", path, scale=0.1, seed=2) != requests("burstgpt", path, scale=0.1, seed=3)


def test_azure_2024_counts_are_kept_exactly(tmp_path: Path) -> None:
    path = written(tmp_path, COUNTS + "2024-05-10 00:00:00,3\n2024-05-10 00:00:10,0\n2024-05-10 00:00:20,5\n")
    found = requests("azure-2024", path, prompt_tokens={"mean": 100, "spread": 0}, output_tokens={"median": 9})
    assert Counter(request.arrived_s // 10 for request in found) == {0: 3, 2: 5}
    assert {request.prompt_tokens for request in found} == {100}
    assert [request.arrived_s // 10 for request in requests("azure-2024", path, from_s=10)] == [1] * 5
    listed = written(tmp_path, AZURE + "2024-05-10 00:00:00,3,4\n")
    assert [request.prompt_tokens for request in requests("azure-2024", listed)] == [3]


def test_sageserve_tokens_become_requests_of_the_mean_length(tmp_path: Path) -> None:
    lines = [f"{m},{name},{w},{t}\n" for name, w, t in (("A", "prod", 12_000), ("b", "dev", 6000)) for m in range(200)]
    path = written(tmp_path, SAGESERVE + "".join(lines))
    lengths = {"mean": 100, "spread": 0.5, "most": 200}
    found = requests("sageserve", path, prompt_tokens=lengths, tiers={"IW-F": 3, "IW-N": 1}, origins={"east": 1})
    for model, tokens in (("a", 200 * 12_000), ("b", 200 * 6000)):
        assert sum(r.prompt_tokens for r in found if r.model == model) == pytest.approx(tokens, rel=0.05)
    assert {request.tier for request in found if request.model == "b"} == {"NIW"}
    shares = Counter(request.tier for request in found if request.model == "a")
    assert shares["IW-F"] / shares["IW-N"] == pytest.approx(3, rel=0.1)
    counts = np.bincount([int(request.arrived_s // 60) for request in found if request.model == "a"])
    assert counts.var() == pytest.approx(counts.mean(), rel=0.35), "Poisson within the minute"


def test_servegen_clients_have_regions_intervals_and_lengths_of_their_own(tmp_path: Path) -> None:
    lines = [f"{c},{t},{rate},1,{p},{k},1\n" for c, rate, p, k in
             (("x", 1.0, "Gamma", 100.0), ("y", 0.5, "Weibull", 0.4), ("z", 0.1, "Gamma", 1.0))
             for t in range(0, 1800, 600)]  # fmt: skip
    path = written(tmp_path, CLIENTS + "".join(lines))
    lengths = tmp_path / "lengths.jsonl"
    windows = {"0": {"input_tokens": "{7: 0.5, 8: 0.5}", "output_tokens": "{3: 1.0}"}}
    windows["21600"] = {"input_tokens": "{}", "output_tokens": "{}"}
    lengths.write_text(json.dumps({"client_chunk": "x", "windows": windows}) + "\n")
    found = requests("servegen", path, lengths=lengths, output_tokens={"median": 50, "spread": 0})
    assert Counter(request.origin for request in found) == {"east": 1800 + 180, "west": 900}
    known = [request for request in found if request.output_tokens == 3]
    assert len(known) == 1800
    assert {request.prompt_tokens for request in known} == {7, 8}
    assert {request.output_tokens for request in found} == {3, 50}
    even, bursty = (np.diff([r.arrived_s for r in part]) for part in (known, [r for r in found if r.origin == "west"]))
    assert even.std() / even.mean() == pytest.approx(0.1, abs=0.02)
    assert bursty.std() / bursty.mean() > 2


def test_intervals_too_long_for_a_number_come_at_random(tmp_path: Path) -> None:
    path = written(tmp_path, CLIENTS + "x,0,1,1,Weibull,0.0001,1\n")
    assert len(requests("servegen", path)) == 600


def test_demand_by_region_with_tiers(tmp_path: Path) -> None:
    rows = "0,west,b,1000,NIW\n0,all,a,1000,\n60,west,b,,IW-F\n60,all,a,0,\n"
    path = written(tmp_path, DEMAND.strip() + ",tier\n" + rows)
    found = requests("csv", path, prompt_tokens={"mean": 10, "spread": 0}, tiers={"IW-F": 1})
    assert all(request.arrived_s < 60 for request in found)
    assert {(r.origin, r.tier) for r in found if r.model == "b"} == {("west", "NIW")}
    assert {(r.origin, r.tier) for r in found if r.model == "a"} == {("east", "IW-F"), ("west", "IW-F")}
    assert len(found) == pytest.approx(12_000, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("servegen", CLIENTS + "x,0,1,1,Cauchy,1,1\n", "line 2: column arrival_pattern must be Gamma or Weibull"),
        ("servegen", CLIENTS + "x,0,1,1,Gamma,0,1\n", "line 2: column param1 must be above 0"),
        ("csv", DEMAND.strip() + ",tier\n0,r,m,1,IW\n", "line 2: column tier must be IW-F, IW-N, NIW or empty"),
        ("azure-2024", COUNTS + "2024-05-10,x\n", "line 2: column TIMESTAMP is no number"),
        ("sageserve", SAGESERVE + "0,A,prod,-1\n", "line 2: column prompt_tokens_per_min must be finite and not neg"),
        ("mooncake", '{"timestamp": 1, "input_length": 2}\n', "line 1: field output_length is missing"),
        ("burstgpt", BURSTGPT + "1,m,1,x,2,x\n", "line 2: column Response tokens is no number: 'x'"),
        (
            "azure-2024",
            COUNTS + "2024-05-10 00:00:00,1\n2024-05-10 00:00:05,1\n",
            "5 s after its time 0 lies before 10",
        ),
        ("sageserve", SAGESERVE + "0,A,prod,1\n0.5,A,prod,1\n", "30 s after its time 0 lies before 60 s"),
        ("servegen", CLIENTS + "x,0,1,1,Gamma,1,1\nx,300,1,1,Gamma,1,1\n", "300 s after its time 0 lies before 600"),
        ("sageserve", SAGESERVE + "0,A,prod,1e300\n", "3.93e+296 requests in the 60 s from 0 s on"),
        ("csv", DEMAND + "0,east,a,1\n1e11,east,a,1e6\n", "3.93e+07 requests in the 1e+11 s from 0 s on"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path: Path, kind: str, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DemandFileError) as caught:
        requests(kind, path, until_s=1e12)
    assert f"{path}: {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"until_s": 5, "from_s": 5}, "until_s: must lie after from_s"),
        ({"tiers": {"IW-F": 0}}, "tiers: at least one share must be over 0"),
        ({"prompt_tokens": {"spread": 1}}, "needs median or mean, and not both"),
        ({"models": {"c": 1}}, "traffic.models.c: no such model"),
    ],
)
def test_what_a_recording_is_told_is_checked(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        scenario("sageserve", tmp_path / "x", **changes)


def mixed(path: Path, **changes: Any) -> Scenario:
    """Two recordings from different days, as requests for a model each."""
    first = {"kind": "azure-2024", "path": path, "until_s": 100, "models": {"a": 1}, "tiers": {"IW-F": 1}}
    second = first | {"from_s": 200, "until_s": 400, "models": {"b": 1}, "scale": 2.0} | changes
    return scenario("azure-2024", path).model_copy(
        update={"traffic": MixedPart.model_validate({"kind": "mixed", "parts": [first, second]})}
    )


def test_recordings_come_at_once_each_from_its_own_time_on(tmp_path: Path) -> None:
    path = written(tmp_path, COUNTS + "".join(f"2024-05-10 00:{m:02}:00,{20 + m}\n" for m in range(10)))
    found = list(traffic_of(mixed(path), 1))
    assert [request.number for request in found] == list(range(len(found)))
    assert all(before.arrived_s <= after.arrived_s for before, after in pairwise(found))
    alone = {
        "a": requests("azure-2024", path, until_s=100, models={"a": 1}, tiers={"IW-F": 1}),
        "b": requests("azure-2024", path, from_s=200, until_s=400, scale=2.0, models={"b": 1}, tiers={"IW-F": 1}),
    }
    for model, own in alone.items():
        assert sum(request.model == model for request in found) == len(own) > 20
    first = [request for request in found if request.model == "a"]
    assert [request.arrived_s for request in first] == [request.arrived_s for request in alone["a"]]
    assert list(traffic_of(mixed(path), 1)) == found
    assert list(traffic_of(mixed(path), 2)) != found
    whole = mixed(path).traffic
    assert isinstance(whole, MixedPart)
    assert whole.duration_s == 200
    assert mixed(path, until_s=None).traffic.duration_s is None  # type: ignore[union-attr]


def test_parts_of_a_mixed_traffic_differ_by_chance_too(tmp_path: Path) -> None:
    path = written(tmp_path, COUNTS + "2024-05-10 00:00:00,200\n")
    found = list(traffic_of(mixed(path, from_s=0, until_s=100, scale=1.0), 1))
    times_s = {model: [one.arrived_s for one in found if one.model == model] for model in "ab"}
    assert len(times_s["a"]) == len(times_s["b"])
    assert times_s["a"] != times_s["b"]


def test_the_mean_after_the_cut_is_what_is_drawn() -> None:
    for lengths in (Lengths(median=100, spread=1.0, most=150), Lengths(median=2, spread=1.5, most=9000)):
        assert lengths.draw(np.random.default_rng(1), 200_000).mean() == pytest.approx(lengths.cut_mean, rel=0.03)


@pytest.mark.skipif(not (DATA / "servegen").is_dir(), reason=f"no recorded demand in {DATA}")
def test_the_public_recordings() -> None:
    found = requests("azure-2023", DATA / "azure/AzureLLMInferenceTrace_code_2023.csv.gz")
    assert len(found) == 8819
    assert len(requests("mooncake", DATA / "mooncake/synthetic_trace.jsonl.gz")) == 3993
    lengths = DATA / "servegen/m-small_lengths.jsonl.gz"
    clients = traffic_of(
        scenario("servegen", DATA / "servegen/m-small_clients.csv.gz", lengths=lengths, until_s=600, scale=0.05), 1
    )
    rate_per_s = 809.8 * 0.05
    assert sum(1 for _ in clients) == pytest.approx(rate_per_s * 600, rel=0.01)
