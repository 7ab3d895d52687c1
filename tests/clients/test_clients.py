"""What clients see: answers whole and streamed, their own classes of errors, batches, and counts of tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import CONTEXT_TOKENS, MODEL, PROGRAMS, Run, Service, told_by

ANSWER_TOKENS = 8
REQUESTS = 40
PYTHON_CLIENTS = {"openai": "openai_chat.py", "langchain": "langchain_chat.py", "litellm": "litellm_chat.py"}


def _check_answers(told: dict[str, Any]) -> None:
    assert told["whole"] == told["streamed"]
    assert len(told["whole"].split()) == ANSWER_TOKENS
    assert told["usage"] == [ANSWER_TOKENS] * 2


def _check_errors(errors: dict[str, list[str]]) -> None:
    """Each is of the client's own class, and says what is wrong in the server's words."""
    expected = {
        "unsupported": ("BadRequestError", "verbosity cannot be set yet"),
        "key": ("AuthenticationError", "Incorrect API key provided"),
        "model": ("NotFoundError", "The model 'nobody' does not exist."),
        "context": ("context", f"the context of '{MODEL}' is {CONTEXT_TOKENS} tokens"),
    }
    assert set(errors) == set(expected)
    for name, (kind, words) in expected.items():
        if name != "context":  # LiteLLM has a class of its own for it
            assert errors[name][0] == kind, errors
        assert words in errors[name][1], errors
    assert errors["context"][0] in {"BadRequestError", "ContextWindowExceededError"}


@pytest.mark.parametrize("client", PYTHON_CLIENTS)
def test_a_client_for_python(run: Run, client: str) -> None:
    told = told_by(run(client, "python", str(PROGRAMS / PYTHON_CLIENTS[client])))
    _check_answers(told)
    _check_errors(told["errors"])
    if client == "langchain":
        assert told["several"] == [told["whole"]] * 3
        assert len(told["older"].split()) == ANSWER_TOKENS
    else:
        assert told["batch"] == ["completed", ["c0", "c1", "c2"]]


def test_openai_for_node(run: Run) -> None:
    told = told_by(run("node", "node", str(PROGRAMS / "chat.mjs")))
    _check_answers(told)
    _check_errors(told["errors"])
    assert told["batch"] == ["completed", ["c0", "c1", "c2"]]
    assert told["context"] == CONTEXT_TOKENS


FORECASTS = {"port": {"brest", "cork"}, "days": {1, 2}}


def _check_forecast(asked: dict[str, Any]) -> None:
    assert asked.keys() == FORECASTS.keys()
    assert all(asked[name] in values for name, values in FORECASTS.items()), asked


def test_openai_for_python_with_tools(run_tools: Run) -> None:
    told = told_by(run_tools("openai", "python", str(PROGRAMS / "openai_tools.py")))
    assert told["finish"] == "tool_calls"
    assert told["called"] == told["streamed"]
    assert told["called"][0] == "Forecast"
    _check_forecast(told["called"][1])
    assert told["deltas"] > 1
    assert told["parsed"]["port"] in {"brest", "cork"}
    assert told["several"] == [0, 1, 2]
    assert set(told["scored"]) == {2}
    assert told["usage"][0] == told["usage"][1] == len(told["scored"])
    assert len(set(told["vectors"])) == 1
    assert told["same"] < 1e-6
    assert [batch[:2] for batch in told["batches"]] == [["completed", 200]] * 3
    assert [batch[2] for batch in told["batches"]] == ["chat.completion", "text_completion", "list"]


def test_responses_of_openai(run_tools: Run) -> None:
    told = told_by(run_tools("openai", "python", str(PROGRAMS / "openai_responses.py")))
    assert told["called"] == told["streamed"]
    assert told["called"][0] == "forecast"
    _check_forecast(told["called"][1])
    assert told["kinds"] == ["response.created", "response.in_progress", "response.completed"]
    assert told["retrieved"]
    assert told["told"] == ["incomplete", "max_output_tokens"]
    assert told["same"] == [True, True]
    assert told["usage"] == ANSWER_TOKENS
    assert told["parsed"]["port"] in {"brest", "cork"}
    assert told["items"] == ["message", "function_call", "function_call_output"]
    assert told["errors"] == {
        "deleted": ["NotFoundError", "response_id", "not_found"],
        "gone": ["BadRequestError", "previous_response_id", "previous_response_not_found"],
        "hosted": ["BadRequestError", "tools.0", "unsupported_parameter"],
    }


def test_messages_of_anthropic(run_tools: Run) -> None:
    told = told_by(run_tools("anthropic", "python", str(PROGRAMS / "anthropic_messages.py")))
    assert told["whole"] == told["streamed"] == told["final"] == told["alone"]
    assert told["stop"] == ["max_tokens", "tool_use", "max_tokens"]
    assert told["usage"] == [ANSWER_TOKENS] * 2
    assert told["prompt"][0] == told["prompt"][1]
    assert told["called"] == told["called_streamed"]
    assert told["called"][0] == "forecast"
    _check_forecast(told["called"][1])
    key, model, image = (told["errors"][name] for name in ("key", "model", "image"))
    assert key == ["AuthenticationError", "Incorrect API key provided.", True]
    assert model == ["NotFoundError", "The model 'nobody' does not exist.", True]
    assert (image[0], image[2]) == ("BadRequestError", True)
    assert "'image'" in image[1]


def test_openai_for_node_with_tools(run_tools: Run) -> None:
    told = told_by(run_tools("node", "node", str(PROGRAMS / "tools.mjs")))
    assert told["finish"] in {"tool_calls", "stop"}  # OpenAI itself ends named calls with stop
    assert told["called"] == told["streamed"]
    _check_forecast(told["called"][1])
    _check_forecast(told["parsed"])
    assert len(set(told["vectors"])) == 1


def test_an_agent_of_langchain(run_tools: Run) -> None:
    told = told_by(run_tools("langchain", "python", str(PROGRAMS / "langchain_agent.py")))
    assert told["kinds"] == ["human", "ai", "tool", "ai"]
    assert told["asked"] == ["forecast"]
    [[port, days]] = told["looked"]
    _check_forecast({"port": port, "days": days})
    assert told["structured"]["hours"] in {1, 2, 3}
    assert len(set(told["vectors"])) == 1


def test_an_agent_of_pydantic_ai(run_tools: Run) -> None:
    told = told_by(run_tools("pydantic", "python", str(PROGRAMS / "pydantic_agent.py")))
    for way in ("by_tool", "by_schema"):
        assert told[way]["port"] in {"brest", "cork"}
        assert told[way]["hours"] in {1, 2, 3}
    assert told["usage"]


def test_the_documentation_in_a_browser(run: Run, service: Service) -> None:
    # The package's Chromium is made for AWS Lambda, and brings its libraries only where it believes to be there.
    told = told_by(run("browser", "node", str(PROGRAMS / "docs.mjs"), AWS_EXECUTION_ENV="AWS_Lambda_nodejs20.x"))
    assert told["errors"] == []
    assert all(asked.startswith((f"{service.url}/", "data:")) for asked in told["asked"]), told["asked"]
    assert {"/v1/chat/completions", "/v1/models", "/admin/status"} <= set(told["drawn"])


def test_llm_on_the_command_line(run: Run, service: Service, tmp_path: Path) -> None:
    about = [{"model_id": MODEL, "model_name": MODEL, "api_base": f"{service.url}/v1", "api_key_name": MODEL}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(about))
    ask = ("-m", MODEL, "-o", "max_tokens", str(ANSWER_TOKENS), "-o", "temperature", "0", "what does the tide bring")

    def llm(*options: str) -> Any:
        return run("llm", "llm", *ask, *options, LLM_USER_PATH=str(tmp_path))

    streamed, whole = llm("--key", service.key), llm("--key", service.key, "--no-stream")
    assert (streamed.returncode, whole.returncode) == (0, 0), streamed.stderr + whole.stderr
    assert streamed.stdout == whole.stdout
    assert len(whole.stdout.split()) == ANSWER_TOKENS
    refused = llm("--key", "tp-client-wrong")
    assert refused.returncode == 1
    assert "Incorrect API key provided" in refused.stderr


def test_guidellm(run: Run, service: Service, tmp_path: Path) -> None:
    finished = run(
        "guidellm", "guidellm", "run",
        "--backend", f"kind=openai_http,target={service.url},model={MODEL},api_key={service.key}",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={service.tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=12",
        "--output", f"kind=json,path={tmp_path / 'out.json'}",
        "--disable-console",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [benchmark] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (REQUESTS, 0)
    for each in requests["successful"]:
        assert (each["prompt_tokens"], each["output_tokens"]) == (20, 12), each


def test_aiperf(run: Run, service: Service, tmp_path: Path) -> None:
    finished = run(
        "aiperf", "aiperf", "profile", "--model", MODEL, "--url", service.url, "--api-key", service.key,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", str(service.tokenizer), "--concurrency", "4",
        "--request-count", str(REQUESTS), "--isl", "20", "--osl", "12", "--extra-inputs", "ignore_eos:true",
        "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "2",
        "--output-artifact-dir", str(tmp_path / "out"),
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert summary["request_count"]["avg"] == REQUESTS
    assert not summary.get("error_summary")
    assert summary["output_sequence_length"]["avg"] == 12
    assert summary["usage_prompt_tokens"]["avg"] == summary["input_sequence_length"]["avg"] == 20
    assert summary["usage_discrepancy_count"]["avg"] == 0
