"""Outcomes of the dispatcher's loops."""

_STUCK_AFTER_S = 600.0
"""Longer than any run should take, also for a batch of the largest size."""


class Outcomes:
    """How each loop's last run ended, and when (seconds on the monotonic clock)."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}
        self._ended_at: dict[str, float] = {}

    def begin(self, what: str, now_s: float) -> None:
        self._ended_at[what] = now_s

    def end(self, what: str, now_s: float, error: Exception | None = None) -> bool:
        """Record the end of a run; whether the previous run ended the other way."""
        failed_before = what in self._errors
        self._ended_at[what] = now_s
        if error is None:
            self._errors.pop(what, None)
        else:
            self._errors[what] = f"{type(error).__name__}: {error}".splitlines()[0]
        return failed_before != (error is not None)

    def trouble(self, now_s: float) -> str | None:
        """The loops that fail or have been in one run for too long; None: all is well."""
        stuck = (what for what, ended_s in self._ended_at.items() if now_s - ended_s > _STUCK_AFTER_S)
        troubles = [f"{what}: {error}" for what, error in self._errors.items()]
        troubles += [f"{what}: no run has ended for {_STUCK_AFTER_S:.0f} s" for what in stuck]
        return "; ".join(troubles) or None
