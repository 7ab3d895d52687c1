"""Runs examinations side by side. Each has a time limit: one that hangs becomes a finding, and holds nobody up."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from dataplane.runtime.masked import mask
from ops.doctor.finding import Finding, failure

Examination = Callable[[], Sequence[Finding]]
"""Gathers facts and checks them; an exception is a failure of its own."""
TIMEOUT_S = 20.0


def examine(
    examinations: Mapping[str, Examination],
    *,
    timeout_s: float = TIMEOUT_S,
    report: Callable[[str, int, int], None] = lambda _name, _done, _all: None,
) -> list[Finding]:
    """The findings of all, in the order given. `report` is told which has ended, and how many of how many have."""
    ended: queue.SimpleQueue[tuple[str, Sequence[Finding]]] = queue.SimpleQueue()
    for name, look in examinations.items():
        threading.Thread(target=_run, args=(name, look, ended), daemon=True, name=f"doctor-{name}").start()
    until_s = time.monotonic() + timeout_s
    found: dict[str, Sequence[Finding]] = {}
    while len(found) < len(examinations):
        try:
            name, findings = ended.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            break
        found[name] = findings
        report(name, len(found), len(examinations))
    return [each for name in examinations for each in found.get(name, (_silent(name, timeout_s),))]


def _run(name: str, look: Examination, ended: "queue.SimpleQueue[tuple[str, Sequence[Finding]]]") -> None:
    try:
        ended.put((name, look()))
    except Exception as error:  # whatever is broken, the others are examined all the same
        told = mask(str(error).strip().partition("\n")[0]) or type(error).__name__
        ended.put((name, [failure(name, told, f"mend what the error names: {name} could not be examined")]))


def _silent(name: str, timeout_s: float) -> Finding:
    return failure(
        name,
        f"no answer within {timeout_s:g} s",
        "see what hangs there: a firewall that drops packets, a full disk, a lock",
    )
