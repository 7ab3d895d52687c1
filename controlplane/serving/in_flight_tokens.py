"""In-flight tokens: what this process has sent to each instance since its last heartbeat (unreported load)."""

import math
import time
from collections import deque
from collections.abc import Mapping

Sending = tuple[float, int, int]
"""When a request was sent, its tokens, and those of its prompt."""


class _Instance:
    """What was sent to one instance, oldest first, and its sums."""

    def __init__(self) -> None:
        self.log: deque[Sending] = deque()
        self.tokens = 0
        self.input_tokens = 0


class SentTokens:
    """Sums by instance. The cost of a request does not grow with the requests before it."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}

    def add(self, instance_id: str, tokens: int, input_tokens: int) -> Sending:
        """Count a request of `tokens`, of which `input_tokens` are its prompt's."""
        sent = self._instances.setdefault(instance_id, _Instance())
        sending = (time.monotonic(), tokens, input_tokens)
        sent.log.append(sending)
        sent.tokens += tokens
        sent.input_tokens += input_tokens
        return sending

    def take_back(self, instance_id: str, sending: Sending) -> None:
        """Uncount a request that the instance refused, unless it was dropped by `forget`."""
        sent = self._instances.get(instance_id)
        if sent is not None and sending in sent.log:
            sent.log.remove(sending)
            sent.tokens -= sending[1]
            sent.input_tokens -= sending[2]

    def of(self, instance_id: str) -> tuple[int, int, int]:
        """Tokens, those of prompts, and requests."""
        sent = self._instances.get(instance_id)
        return (0, 0, 0) if sent is None else (sent.tokens, sent.input_tokens, len(sent.log))

    def forget(self, reported_at_s: Mapping[str, float]) -> None:
        """Drop what was sent before an instance's last report, and all of instances without one."""
        for instance_id, sent in list(self._instances.items()):
            until_s = reported_at_s.get(instance_id, math.inf)
            while sent.log and sent.log[0][0] <= until_s:
                _, tokens, input_tokens = sent.log.popleft()
                sent.tokens -= tokens
                sent.input_tokens -= input_tokens
            if not sent.log:
                del self._instances[instance_id]
