"""What this process expects of answers, by model, from those that it has passed on."""

from controlplane.serving.in_flight import InFlightRequest
from dataplane.protocol.answer_lengths import AnswerLengths
from dataplane.protocol.messages import Finished


class ExpectedLengths:
    """The lengths of answers by model. One for a process."""

    def __init__(self) -> None:
        self._models: dict[str, AnswerLengths] = {}

    def to_come(self, request: InFlightRequest) -> int:
        """The tokens of its answer that an instance will probably make."""
        message = request.message
        if message.pooling:
            return 0
        most = message.sampling.max_tokens or request.context_tokens
        return self._of(message.model).rest(len(request.token_ids), most)

    def note(self, model: str, end: Finished) -> None:
        """An answer ended."""
        if end.completion_tokens:
            self._of(model).note(end.completion_tokens, cut=end.finish_reason == "length")

    def _of(self, model: str) -> AnswerLengths:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = AnswerLengths()
        return found
