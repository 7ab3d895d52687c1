"""OpenAI's client for Python: responses whole, streamed, parsed, with a function, continued. Prints what it saw."""

import json
import os
import warnings
from typing import Literal

import openai
from openai.types.responses import Response
from pydantic import BaseModel

warnings.simplefilter("error")
url, key, model = (os.environ[f"TIDEPOOL_TEST_{name}"] for name in ("URL", "KEY", "MODEL"))
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=300)
api = client.responses
ask = {"model": model, "temperature": 0, "max_output_tokens": 700}
question = "When is the tide in Brest?"


class Tide(BaseModel):
    """A forecast."""

    port: Literal["brest", "cork"]
    hours: Literal[1, 2, 3]


parameters = {
    "type": "object",
    "additionalProperties": False,
    "required": ["port", "days"],
    "properties": {"port": {"enum": ["brest", "cork"]}, "days": {"enum": [1, 2]}},
}
tool = {"type": "function", "name": "forecast", "parameters": parameters, "strict": True}
forced = ask | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}

called = api.create(**forced, input=question)
with api.stream(**forced, input=question) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_response()
Response.model_validate(called.model_dump(by_alias=True, exclude_unset=True))
[call] = [item for item in called.output if item.type == "function_call"]
[again] = [item for item in streamed.output if item.type == "function_call"]
result = {"type": "function_call_output", "call_id": call.call_id, "output": "at noon"}
follow = forced | {"tool_choice": "none", "max_output_tokens": 8}
told = api.create(**follow, input=[result], previous_response_id=called.id)
context = [{"role": "user", "content": question}, *called.output, result]
same = api.create(**follow, input=context, store=False)
parsed = api.parse(**ask, input=question, text_format=Tide)
items = [item.type for item in api.input_items.list(told.id, order="asc", limit=2)]
api.delete(told.id)


def error_of(call, *names, **options):
    try:
        call(*names, **options)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.param, error.code]
    return None


print(
    json.dumps(
        {
            "called": [call.name, json.loads(call.arguments)],
            "streamed": [again.name, json.loads(again.arguments)],
            "kinds": [kinds[0], kinds[1], kinds[-1]],
            "retrieved": api.retrieve(called.id) == called,
            "told": [told.status, told.incomplete_details and told.incomplete_details.reason],
            "same": [told.output_text == same.output_text, told.usage.input_tokens == same.usage.input_tokens],
            "usage": told.usage.output_tokens,
            "parsed": parsed.output_parsed.model_dump(),
            "items": items,
            "errors": {
                "deleted": error_of(api.retrieve, told.id),
                "gone": error_of(api.create, **ask, input="hi", previous_response_id=told.id),
                "hosted": error_of(api.create, **ask, input="hi", tools=[{"type": "web_search"}]),
            },
        }
    )
)
client.close()
