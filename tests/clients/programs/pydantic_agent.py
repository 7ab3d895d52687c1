"""Pydantic AI: structured output by a tool and by a JSON schema, whole and streamed. Prints what it saw as JSON."""

import json
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, key, name = (os.environ[f"TIDEPOOL_TEST_{name}"] for name in ("URL", "KEY", "MODEL"))
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
settings = {"temperature": 0, "max_tokens": 96, "timeout": 300}


class Tide(BaseModel):
    """A forecast."""

    port: Literal["brest", "cork"]
    hours: Literal[1, 2, 3]


question = "When is the tide in Brest?"
by_tool = Agent(model, output_type=Tide, model_settings=settings).run_sync(question)
by_schema = Agent(model, output_type=NativeOutput(Tide), model_settings=settings).run_sync(question)

print(
    json.dumps(
        {
            "by_tool": by_tool.output.model_dump(),
            "by_schema": by_schema.output.model_dump(),
            "usage": by_schema.usage.output_tokens > 0,
        }
    )
)
