"""OpenAI's client for Python: tool calls, parsed answers, several choices, log probabilities, embeddings, batches of
each endpoint. Prints what it saw as JSON.
"""

import json
import os
import time
from typing import Literal

import openai
from pydantic import BaseModel

url, key, model, embedder = (os.environ[f"TIDEPOOL_TEST_{name}"] for name in ("URL", "KEY", "MODEL", "EMBEDDER"))
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=300)


class Tide(BaseModel):
    """A forecast."""

    port: Literal["brest", "cork"]
    hours: Literal[1, 2, 3]


class Forecast(BaseModel):
    """Look up the tide."""

    port: Literal["brest", "cork"]
    days: Literal[1, 2]


question = {"role": "user", "content": "When is the tide in Brest?"}
ask = {"model": model, "messages": [question], "max_tokens": 96, "temperature": 0}
forced = ask | {"tools": [openai.pydantic_function_tool(Forecast)], "tool_choice": "required"}

called = client.chat.completions.create(**forced)
[call] = called.choices[0].message.tool_calls
with client.chat.completions.stream(**forced) as stream:
    deltas = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
    streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
result = {"role": "tool", "tool_call_id": call.id, "content": "at noon"}
told = client.chat.completions.create(**ask | {"messages": [question, called.choices[0].message, result]})
parsed = client.chat.completions.parse(**ask, response_format=Tide)
several = client.chat.completions.create(
    **ask | {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
)
vectors = client.embeddings.create(model=embedder, input=["high water", "low water"])
floats = client.embeddings.create(model=embedder, input="high water", encoding_format="float")


def batch_of(endpoint: str, body: dict[str, object]) -> list[object]:
    line = {"custom_id": "one", "method": "POST", "url": endpoint, "body": body}
    uploaded = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h")
    while batch.status not in {"completed", "failed", "expired", "cancelled"}:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    if batch.output_file_id is None:
        return [batch.status]
    answer = json.loads(client.files.content(batch.output_file_id).text.splitlines()[0])
    return [batch.status, answer["response"]["status_code"], answer["response"]["body"]["object"]]


print(
    json.dumps(
        {
            "finish": called.choices[0].finish_reason,
            "called": [call.function.name, json.loads(call.function.arguments)],
            "streamed": [streamed.function.name, json.loads(streamed.function.arguments)],
            "deltas": deltas,
            "told": len(told.choices[0].message.content),
            "parsed": parsed.choices[0].message.parsed.model_dump(),
            "several": [choice.index for choice in several.choices],
            "scored": [len(each.top_logprobs) for choice in several.choices for each in choice.logprobs.content or []],
            "usage": [several.usage.completion_tokens, several.usage.total_tokens - several.usage.prompt_tokens],
            "vectors": [len(each.embedding) for each in vectors.data],
            "same": max(abs(a - b) for a, b in zip(vectors.data[0].embedding, floats.data[0].embedding, strict=True)),
            "batches": [
                batch_of("/v1/chat/completions", forced | {"service_tier": "flex"}),
                batch_of("/v1/completions", {"model": model, "prompt": "the tide", "max_tokens": 4}),
                batch_of("/v1/embeddings", {"model": embedder, "input": "the tide"}),
            ],
        }
    )
)
