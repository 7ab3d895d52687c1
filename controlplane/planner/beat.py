"""The scheduler of Celery beat. Celery's own logs a traceback for each task that it cannot send."""

from typing import Any

import structlog
from celery.beat import ScheduleEntry, Scheduler, SchedulingError
from kombu.exceptions import OperationalError

log = structlog.get_logger()


class BeatScheduler(Scheduler):
    """Logs once that the broker is unreachable, and once that it is reachable again."""

    _away = False

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send a task that is due; a task that cannot be sent is dropped until its next time."""
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as error:
            if isinstance(error.__context__, OperationalError):
                self._note_away(error.__context__)
            else:
                log.exception("a loop was not started", task=entry.task)
        else:
            self._note_back()

    def _ensure_connected(self) -> Any:
        """The connection; waits for the broker without a limit."""
        connected = self.connection.ensure_connection(lambda error, _interval_s: self._note_away(error))
        self._note_back()
        return connected

    def _note_away(self, error: Exception) -> None:
        if not self._away:
            log.warning("the broker is away; no loop is started until it is back", error=str(error))
        self._away = True

    def _note_back(self) -> None:
        if self._away:
            log.info("the broker is back")
        self._away = False
