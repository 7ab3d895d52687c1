"""A wrong time of day for the processes of a region.

Tidepool's own read the time of day by `time.time` alone, which `ops.cli.skewed` shifts. The clocks of Postgres and
Valkey are shifted by libfaketime, where it is installed; it is not used for Python, whose `time.sleep` it breaks.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Command = Callable[[tuple[str, ...]], tuple[str, ...]]
_PLACES = ("lib/*/faketime/libfaketime.so.1", "lib*/faketime/libfaketime.so.1")
_PLAIN = ("-m", "ops.cli.main")


def shift_library() -> Path | None:
    """libfaketime, as distributions install it; None: it is not installed."""
    return next((found for place in _PLACES for found in sorted(Path("/usr").glob(place))), None)


def skews_s(regions: Sequence[str], by_s: float) -> dict[str, float]:
    """The first region's clocks are right, the second's are ahead and the third's behind."""
    return dict(zip(regions, (0.0, by_s, -by_s), strict=True))


def shifted(by_s: float, library: Path | None) -> Command:
    """What a process is run by whose clock is ahead by so much, in place of its plain command."""

    def command(argv: tuple[str, ...]) -> tuple[str, ...]:
        if by_s == 0:
            return argv
        if (at := next((n for n in range(len(argv)) if argv[n : n + 2] == _PLAIN), None)) is not None:
            return (*argv[:at], "-m", "ops.cli.skewed", str(by_s), *argv[at + 2 :])
        if library is None:
            return argv
        # after a change of user, which takes the library's shared memory away from it
        program = len(argv) - argv[::-1].index("--") if "--" in argv else 0
        return (*argv[:program], "env", *_assigned(_variables(by_s, library)), *argv[program:])

    return command


def _variables(by_s: float, library: Path) -> Mapping[str, str]:
    kept = {"DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
    return {"LD_PRELOAD": str(library), "FAKETIME": f"{by_s:+g}", **kept}


def _assigned(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]
