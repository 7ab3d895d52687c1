"""How the dispatcher's loops fare: what is noted of the whole."""

_STUCK_AFTER_S = 600.0
"""Longer than any run should take, that of a batch of the largest size included."""


class Outcomes:
    """How each loop's last run ended, and when (seconds on the monotonic clock)."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}
        self._ended_at: dict[str, float] = {}

    def begin(self, what: str, now_s: float) -> None:
        """A loop starts."""
        self._ended_at[what] = now_s

    def end(self, what: str, now_s: float, error: Exception | None = None) -> bool:
        """A run ended. Whether the run before it ended the other way."""
        failed_before = what in self._errors
        self._ended_at[what] = now_s
        if error is None:
            self._errors.pop(what, None)
        else:
            self._errors[what] = f"{type(error).__name__}: {error}".splitlines()[0]
        return failed_before != (error is not None)

    def trouble(self, now_s: float) -> str | None:
        """What fails, or has been in one run for too long; None: nothing."""
        stuck = (what for what, ended_s in self._ended_at.items() if now_s - ended_s > _STUCK_AFTER_S)
        words = [f"{what}: {error}" for what, error in self._errors.items()]
        words += [f"{what}: no run has ended for {_STUCK_AFTER_S:.0f} s" for what in stuck]
        return "; ".join(words) or None
