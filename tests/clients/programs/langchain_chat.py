"""LangChain: answers, errors, several questions at once, the older completions. Prints what it saw as JSON."""

import json
import os

import openai
from langchain_openai import ChatOpenAI, OpenAI

url, key, model = (os.environ[f"TIDEPOOL_TEST_{name}"] for name in ("URL", "KEY", "MODEL"))
options = {"base_url": f"{url}/v1", "api_key": key, "model": model, "temperature": 0, "max_tokens": 8}
chat = ChatOpenAI(**options)
question = "what does the tide bring"

whole = chat.invoke(question)
chunks = list(chat.stream(question, stream_usage=True))


def error_of(call):
    try:
        call()
    except openai.APIStatusError as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__.startswith("openai"))
        return [kind.__name__, error.message]
    return None


errors = {
    "unsupported": error_of(lambda: ChatOpenAI(**options, extra_body={"verbosity": "high"}).invoke(question)),
    "key": error_of(lambda: ChatOpenAI(**options | {"api_key": "tp-client-wrong"}).invoke(question)),
    "model": error_of(lambda: ChatOpenAI(**options | {"model": "nobody"}).invoke(question)),
    "context": error_of(lambda: ChatOpenAI(**options | {"max_tokens": 10**6}).invoke(question)),
}
print(
    json.dumps(
        {
            "whole": whole.content,
            "streamed": "".join(chunk.content for chunk in chunks),
            "usage": [
                whole.usage_metadata["output_tokens"],
                next(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata),
            ],
            "errors": errors,
            "several": [answer.content for answer in chat.batch([question] * 3)],
            "older": OpenAI(**options).invoke(question),
        }
    )
)
