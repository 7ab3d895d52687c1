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
