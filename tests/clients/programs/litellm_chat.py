"""LiteLLM: answers, errors, a batch. Prints what it saw as JSON."""

import json
import os
import time

import litellm
import openai

url, key, model = (os.environ[f"TIDEPOOL_TEST_{name}"] for name in ("URL", "KEY", "MODEL"))
where = {"api_base": f"{url}/v1", "api_key": key}
ask = {"model": f"openai/{model}", "messages": [{"role": "user", "content": "what does the tide bring"}]}
ask |= {"max_tokens": 8, "temperature": 0, **where}

whole = litellm.completion(**ask)
chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))


def error_of(**options):
    try:
        litellm.completion(**ask | options)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.message]
    return None


errors = {
    "unsupported": error_of(extra_body={"verbosity": "high"}),
    "key": error_of(api_key="tp-client-wrong"),
    "model": error_of(model="openai/nobody"),
    "context": error_of(max_tokens=10**6),
}

body = {"model": model, "messages": ask["messages"], "max_tokens": 8}
lines = [{"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(3)]
content = "\n".join(map(json.dumps, lines)).encode()
uploaded = litellm.create_file(file=("lines.jsonl", content), purpose="batch", custom_llm_provider="openai", **where)
batch = litellm.create_batch(
    input_file_id=uploaded.id,
    endpoint="/v1/chat/completions",
    completion_window="24h",
    custom_llm_provider="openai",
    **where,
)
while batch.status not in {"completed", "failed", "expired", "cancelled"}:
    time.sleep(0.2)
    batch = litellm.retrieve_batch(batch_id=batch.id, custom_llm_provider="openai", **where)
output = litellm.file_content(file_id=batch.output_file_id, custom_llm_provider="openai", **where)
answers = [json.loads(line) for line in output.text.splitlines()]

print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "usage": [
                whole.usage.completion_tokens,
                next(chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)),
            ],
            "errors": errors,
            "batch": [batch.status, sorted(answer["custom_id"] for answer in answers)],
        }
    )
)
