"""LangChain: an agent that calls a tool and answers, structured output, embeddings. Prints what it saw as JSON."""

import json
import os
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

url, key, model, embedder = (os.environ[f"TIDEPOOL_TEST_{name}"] for name in ("URL", "KEY", "MODEL", "EMBEDDER"))
chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, temperature=0, max_tokens=96, timeout=300)
looked: list[list[object]] = []


class Tide(BaseModel):
    """A forecast."""

    port: Literal["brest", "cork"]
    hours: Literal[1, 2, 3]


def forecast(port: Literal["brest", "cork"], days: Literal[1, 2]) -> str:
    """Look up the tide."""
    looked.append([port, days])
    return "high water at noon"


@wrap_model_call
def one_call(request, handler):
    """A model with random weights calls tools only when it must, and would never stop."""
    called = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="none" if called else "required"))


agent = create_agent(chat, [forecast], middleware=[one_call])
messages = agent.invoke({"messages": [{"role": "user", "content": "When is the tide in Brest?"}]})["messages"]
structured = chat.with_structured_output(Tide, method="json_schema", strict=True).invoke("When is the tide?")
embeddings = OpenAIEmbeddings(base_url=f"{url}/v1", api_key=key, model=embedder, check_embedding_ctx_length=False)

print(
    json.dumps(
        {
            "kinds": [message.type for message in messages],
            "looked": looked,
            "asked": [
                call["name"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls
            ],
            "structured": structured.model_dump(),
            "vectors": [len(vector) for vector in embeddings.embed_documents(["high water", "low water"])],
        }
    )
)
