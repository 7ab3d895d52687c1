"""A prefill slot and a decode slot, here or in processes of their own, and what their dispatcher does."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.engines.torch.copies.base import CopyStream
from dataplane.engines.torch.copies.cpu import ThreadStream
from dataplane.engines.torch.engine import TorchEngine
from tests.dataplane.engines.torch.drive import Gathered
from tests.dataplane.engines.torch.fake_streams import FakeStream
from tests.dataplane.engines.torch.faults import FaultyStream

DELAY_S = 0.003


class Streams:
    """The streams of an engine: late, out of order, and failing. `device`: copies run by themselves, as on a GPU."""

    def __init__(self, seed: object, *, device: bool = False, fail_share: float = 0.15) -> None:
        self.made: dict[str, FaultyStream] = {}
        self._seed, self._device, self._fail_share = seed, device, fail_share

    def make(self, name: str) -> CopyStream:
        rng = random.Random(f"{self._seed} {name}")
        on_device = self._device and name.startswith("kv")
        inners: list[CopyStream] = [
            FakeStream(f"{name}-{number}", rng, DELAY_S) if on_device else ThreadStream(f"{name}-{number}")
            for number in range(2)
        ]
        self.made[name] = FaultyStream(inners, rng, delay_s=DELAY_S, fail_share=self._fail_share)
        return self.made[name]


@dataclass(kw_only=True)
class Handing:
    """Requests on their way through a prefill slot and a decode slot, as the dispatcher sees them. `release`: of the
    prefill slot.
    """

    wanted: dict[str, EngineRequest]
    decoder: TorchEngine
    release: Callable[[str], None]
    gathered: Gathered = field(default_factory=Gathered)
    decoding: dict[str, bool] = field(default_factory=dict)
    """Whether the prefill slot keeps its KV, by requests of the decode slot."""
    announced: int = 0
    """Requests whose transfer was under way when they were handed over."""

    def prefilled(self, outputs: Sequence[EngineOutput]) -> None:
        """Pass on what the prefill slot made."""
        for output in outputs:
            if output.kv is None:
                self.gathered.take([output])
                continue
            one = self.wanted.get(output.request_id)
            if one is None:  # cancelled meanwhile
                self.release(output.request_id)
                continue
            self.announced += output.kv.event is not None
            self.decoding[one.request_id] = True
            made = self.gathered.tokens[one.request_id]
            self.decoder.add(replace(one, generated=made, kv=output.kv))

    def decode(self) -> None:
        """Run a step of the decode slot; what has its first output there is released on the prefill slot."""
        outputs = self.decoder.step()
        self.gathered.take(outputs)
        for output in outputs:
            if self.decoding.get(output.request_id):
                self.decoding[output.request_id] = False
                self.release(output.request_id)

    def cancel(self, request_id: str) -> None:
        del self.wanted[request_id]
        if request_id in self.decoding:
            self.decoder.cancel(request_id)
            if self.decoding[request_id]:
                self.release(request_id)

    @property
    def over(self) -> bool:
        ended = {*self.gathered.finished, *self.gathered.errors}
        return ended.issuperset(self.wanted) and not self.decoder.has_work()


def table_of(folder: Path, name: str) -> Path:
    """Where a fake device has its events."""
    return folder / f"{name}.device"
