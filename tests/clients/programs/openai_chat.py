"""OpenAI's client for Python: answers, errors, a batch. Prints what it saw as JSON."""

import json
import os
import time

import openai

url, key, model = (os.environ[f"TIDEPOOL_TEST_{name}"] for name in ("URL", "KEY", "MODEL"))
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
ask = {"model": model, "messages": [{"role": "user", "content": "what does the tide bring"}], "max_tokens": 8}
ask |= {"temperature": 0, "stop": None, "tools": [], "n": 1}

whole = client.chat.completions.create(**ask)
chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))


def error_of(call, **options):
    try:
        call(**options)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.message]
    return None


stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="tp-client-wrong")
errors = {
    "unsupported": error_of(client.chat.completions.create, **ask | {"verbosity": "high"}),
    "key": error_of(stranger.chat.completions.create, **ask),
    "model": error_of(client.chat.completions.create, **ask | {"model": "nobody"}),
    "context": error_of(client.chat.completions.create, **ask | {"max_tokens": 10**6}),
}

body = ask | {"service_tier": "flex"}
lines = [{"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(3)]
content = "\n".join(map(json.dumps, lines)).encode()
uploaded = client.files.create(file=("lines.jsonl", content), purpose="batch")
batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in {"completed", "failed", "expired", "cancelled"}:
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]

print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "usage": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
            "errors": errors,
            "batch": [batch.status, sorted(answer["custom_id"] for answer in answers)],
            "context": client.models.retrieve(model).max_model_len,
        }
    )
)
