"""Anthropic's client for Python: messages, whole, streamed, with a tool, and errors. Prints what it saw as JSON."""

import asyncio
import json
import os
import warnings

import anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

warnings.simplefilter("error")
url, key, model = (os.environ[f"TIDEPOOL_TEST_{name}"] for name in ("URL", "KEY", "MODEL"))
client = anthropic.Anthropic(base_url=url, api_key=key, timeout=300)
ask = {"model": model, "max_tokens": 8, "extra_body": {"temperature": 0}}
ask |= {"messages": [{"role": "user", "content": "When is the tide in Brest?"}], "system": "be brief"}
schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["port", "days"],
    "properties": {"port": {"enum": ["brest", "cork"]}, "days": {"enum": [1, 2]}},
}
tool = {"name": "forecast", "description": "the tide", "input_schema": schema, "strict": True}
forced = ask | {"max_tokens": 700, "tools": [tool]}
forced |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}

whole = client.messages.create(**ask)
Message.model_validate(whole.model_dump(exclude_unset=True))
with client.messages.stream(**ask) as stream:
    text = "".join(stream.text_stream)
    streamed = stream.get_final_message()
for event in client.messages.create(**ask, stream=True):
    TypeAdapter(RawMessageStreamEvent).validate_python(event.model_dump(exclude_unset=True))

counted = client.messages.count_tokens(**{name: ask[name] for name in ("model", "messages", "system")})
called = client.messages.create(**forced)
[use] = [block for block in called.content if block.type == "tool_use"]
with client.messages.stream(**forced) as stream:
    [again] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
result = {"type": "tool_result", "tool_use_id": use.id, "content": "at noon"}
turns = [*ask["messages"], {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
told = client.messages.create(**ask | {"messages": turns, "tools": [tool], "tool_choice": {"type": "none"}})


async def alone() -> str:
    async with anthropic.AsyncAnthropic(base_url=url, auth_token=key, api_key=None) as other:
        message = await other.messages.create(**ask)
    return message.content[0].text


def error_of(as_client=client, **options):
    try:
        as_client.messages.create(**options)
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.body["error"]["message"], error.request_id is not None]
    return None


stranger = anthropic.Anthropic(base_url=url, api_key="tp-client-wrong")
image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
print(
    json.dumps(
        {
            "whole": whole.content[0].text,
            "streamed": text,
            "final": streamed.content[0].text,
            "alone": asyncio.run(alone()),
            "stop": [whole.stop_reason, called.stop_reason, told.stop_reason],
            "usage": [whole.usage.output_tokens, streamed.usage.output_tokens],
            "prompt": [counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens],
            "called": [use.name, use.input],
            "called_streamed": [again.name, again.input],
            "errors": {
                "key": error_of(stranger, **ask),
                "model": error_of(**ask | {"model": "nobody"}),
                "image": error_of(**ask | {"messages": [{"role": "user", "content": [image]}]}),
            },
        }
    )
)
client.close()
stranger.close()
