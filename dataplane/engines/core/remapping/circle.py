"""Which layers of a model share memory in rotation, and whether their loads are hidden (Oneiros 5.4). Pure.

Decoding runs the layers in a circle. When alpha of a model's n layers are offloaded, beta frames of one layer's memory
each are shared by m = alpha + beta layers, the *rotating* ones, and n - m layers stay. A frame is free once its layer
has run; the next rotating layer that is not in memory is loaded into it, one load at a time.

    n = 8, alpha = 1, beta = 1:    [0] 1 2 3 [4] 5 6 7 [0] 1 ...    0 runs | 4 loads during 1 2 3 | 4 runs | 0 loads ...

When nothing waits, d loads in a row have the time from the end of the first one's predecessor in its frame to the start
of the last one's layer: d + beta - 1 gaps between rotating layers, less the layer that must have run before. So loads
are hidden if and only if, for every window of rotating layers,

    d T_T <= T_c (layers in d + beta - 1 gaps - 1)   and   m T_T <= T_c n

Evenly spaced, at floor(i n / m), the worst window of w gaps has floor(w n / m) layers; no spacing has more in its worst
window, because m windows of w gaps go w times round the circle. Even spacing is thus best for every d at once. The
paper's two inequalities are d = 1 of beta = 1, and the second condition of beta = 2, if m divides n; if it does not,
some gaps are shorter than n / m, and inequality 4 alone would promise more than the shortest gap allows.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from math import lcm

FRAMES_MAX = 3
"""More frames hide nothing more: the layers they rotate cost more than the waiting they save."""


@dataclass(frozen=True, kw_only=True)
class Circle:
    """The layers of one model as they run. `load_s`: T_T, to load one; `compute_s`: T_c, to run one (seconds)."""

    layers: int
    load_s: float
    compute_s: float

    def __post_init__(self) -> None:
        assert self.layers > 0, self.layers
        assert self.load_s > 0, self.load_s
        assert self.compute_s > 0, self.compute_s


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How the layers of a model share memory while `offloaded` of them (alpha) are offloaded; 0: nothing rotates.

    `frames`: beta, 0 if nothing is offloaded. Load number j, counted from 0 without end, is of layer
    `rotating[j % m]` into frame `j % frames`, as soon as load number j - frames has run there: if frames do not divide
    m, a layer's frame changes from round to round.
    """

    layers: int
    offloaded: int = 0
    frames: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.offloaded < self.layers, (self.offloaded, self.layers)
        assert (self.frames > 0) == (self.offloaded > 0), (self.frames, self.offloaded)
        assert self.offloaded + self.frames <= self.layers, (self.offloaded, self.frames, self.layers)

    @property
    def rotating_layers(self) -> int:
        """M: how many layers rotate, each loaded once per step."""
        return self.offloaded + self.frames

    @property
    def rotating(self) -> tuple[int, ...]:
        """Their numbers, evenly spaced on the circle, ascending from 0; empty if nothing is offloaded."""
        return spaced(self.layers, self.rotating_layers)


def spaced(layers: int, count: int) -> tuple[int, ...]:
    """`count` of the layers `0 .. layers-1`, evenly spaced on the circle: floor(i n / m)."""
    assert 0 <= count <= layers, (count, layers)
    return tuple(i * layers // count for i in range(count))


def is_hidden(circle: Circle, rotation: Rotation) -> bool:
    """Whether no layer ever waits for a load, by the two conditions above.

    Of one frame d = 1 is the worst case. Of more, no d is violated if the link keeps up and beta - 1 gaps have two
    layers: rounding takes less than one, and the layer that must have run before is the other.
    """
    n, m, frames = circle.layers, rotation.rotating_layers, rotation.frames
    assert rotation.layers == n, (rotation, circle)
    if not rotation.offloaded:
        return True
    if m * circle.load_s > n * circle.compute_s:
        return False
    if (frames - 1) * n >= 2 * m:
        return True
    return all(
        loads * circle.load_s <= circle.compute_s * ((loads + frames - 1) * n // m - 1)
        for loads in range(1, 2 if frames == 1 else m + 1)
    )


def choose_rotation(
    circle: Circle, offloaded: int, *, frames_min: int = 1, frames_max: int = FRAMES_MAX
) -> Rotation | None:
    """The rotation of the fewest layers whose loads are hidden while so many are offloaded; None if there is none.

    Fewer rotating layers mean fewer bytes over the link. `frames_min`, `frames_max`: 1, 1 is m = alpha + 1 always,
    2, 2 is m = alpha + 2 always.
    """
    if not offloaded:
        return Rotation(layers=circle.layers)
    for frames in range(frames_min, frames_max + 1):
        if offloaded + frames > circle.layers:
            return None
        if not _waits(circle, frames, offloaded):
            return Rotation(layers=circle.layers, offloaded=offloaded, frames=frames)
    return None


def least_waiting(circle: Circle, offloaded: int, *, frames_min: int = 1, frames_max: int = FRAMES_MAX) -> Rotation:
    """The rotation with the shortest step, hidden or not; the fewest layers of those equally short."""
    if not offloaded:
        return Rotation(layers=circle.layers)
    most = max(min(frames_max, circle.layers - offloaded), 1)
    options = (
        Rotation(layers=circle.layers, offloaded=offloaded, frames=frames)
        for frames in range(min(frames_min, most), most + 1)
    )
    return min(options, key=lambda rotation: step_s(circle, rotation))


def deepest(circle: Circle, *, frames_min: int = 1, frames_max: int = FRAMES_MAX) -> int:
    """How many layers can be offloaded at most so that loads are hidden. For fewer they are hidden too: with as many
    frames, every window of fewer rotating layers is as long or longer.
    """
    found = 0
    for frames in range(frames_min, frames_max + 1):
        waits = partial(_waits, circle, frames)
        found += bisect_left(range(found + 1, circle.layers - frames + 1), True, key=waits)
    return found


def _waits(circle: Circle, frames: int, offloaded: int) -> bool:
    return not is_hidden(circle, Rotation(layers=circle.layers, offloaded=offloaded, frames=frames))


def step_s(circle: Circle, rotation: Rotation) -> float:
    """Seconds of a step in the long run: n T_c, and the waits for loads.

    An exact schedule of loads and computes round the circle until it repeats, which after a few rounds it does, every
    lcm(1 .. `FRAMES_MAX`) of them.
    """
    n, m, frames = circle.layers, rotation.rotating_layers, rotation.frames
    assert rotation.layers == n, (rotation, circle)
    if not rotation.offloaded:
        return n * circle.compute_s
    gaps = [(i + 1) * n // m - i * n // m for i in range(m)]
    period = lcm(*range(1, FRAMES_MAX + 1))
    starts: list[float] = []
    ready_s = loaded_s = 0.0
    for number in range(m * (2 * period + 1)):
        free_s = starts[number - frames] + circle.compute_s if number >= frames else 0.0
        loaded_s = max(loaded_s, free_s) + circle.load_s
        starts.append(max(ready_s, loaded_s))
        ready_s = starts[-1] + gaps[number % m] * circle.compute_s
    return (starts[2 * period * m] - starts[period * m]) / period
