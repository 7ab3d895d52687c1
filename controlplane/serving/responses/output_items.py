"""The items of an answer while they are written. Each makes the bodies of its events; the writer numbers them."""

from typing import Any, Literal

from controlplane.serving.responses.items import Item, output_text

Body = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
Logprobs = list[dict[str, Any]]


class MessageOutput:
    """A message with one part of text."""

    def __init__(self, item_id: str) -> None:
        self.item_id = item_id
        self._pieces: list[str] = []
        self._logprobs: Logprobs = []

    def begin(self) -> list[Body]:
        """The events between `output_item.added` and the first text."""
        return [_part_event("added", output_text(""))]

    def add(self, text: str, logprobs: Logprobs) -> Body:
        """The event of more text, with the log probabilities of its tokens."""
        self._pieces.append(text)
        self._logprobs += logprobs
        return {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": logprobs}

    def end(self) -> list[Body]:
        """The events between the last text and `output_item.done`."""
        part = self._part()
        done = {
            "type": "response.output_text.done",
            "content_index": 0,
            "text": part["text"],
            "logprobs": part["logprobs"],
        }
        return [done, _part_event("done", part)]

    def item(self, status: Status) -> Item:
        """The item as it is now."""
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        return output_text("".join(self._pieces), self._logprobs)


class ReasoningOutput:
    """What the model thinks before its answer, word for word."""

    def __init__(self, item_id: str) -> None:
        self.item_id = item_id
        self._pieces: list[str] = []

    def begin(self) -> list[Body]:
        """The events between `output_item.added` and the first text."""
        return [_part_event("added", {"type": "reasoning_text", "text": ""})]

    def add(self, text: str) -> Body:
        """The event of more text."""
        self._pieces.append(text)
        return {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def end(self) -> list[Body]:
        """The events between the last text and `output_item.done`."""
        part = self._part()
        done = {"type": "response.reasoning_text.done", "content_index": 0, "text": part["text"]}
        return [done, _part_event("done", part)]

    def item(self, status: Status) -> Item:
        """The item as it is now."""
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.item_id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._pieces)}


class CallOutput:
    """A call of a function."""

    def __init__(self, item_id: str, call_id: str, name: str) -> None:
        self.item_id = item_id
        self._call_id = call_id
        self._name = name
        self._pieces: list[str] = []

    def begin(self) -> list[Body]:
        """Nothing is between `output_item.added` and the first argument."""
        return []

    def add(self, arguments: str) -> Body:
        """The event of more of the arguments' JSON text."""
        self._pieces.append(arguments)
        return {"type": "response.function_call_arguments.delta", "delta": arguments}

    def end(self) -> list[Body]:
        """The events between the last argument and `output_item.done`."""
        arguments = "".join(self._pieces)
        return [{"type": "response.function_call_arguments.done", "name": self._name, "arguments": arguments}]

    def item(self, status: Status) -> Item:
        """The item as it is now."""
        arguments = "".join(self._pieces)
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": arguments,
        }


OutputItem = MessageOutput | ReasoningOutput | CallOutput


def _part_event(what: Literal["added", "done"], part: dict[str, Any]) -> Body:
    return {"type": f"response.content_part.{what}", "content_index": 0, "part": part}
