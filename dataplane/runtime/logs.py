"""The logs of every process, of the control plane's and of the node's: on standard error, without secrets, as lines for
people or as JSON.

`TIDEPOOL_LOG_LEVEL` and `TIDEPOOL_LOG_FORMAT` are read by all of them, agents and their workers included, so that one
machine has one rule. Libraries log from `warning` on; at `debug`, from `info` on.
"""

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from types import TracebackType
from typing import IO, Any, Literal, cast

import structlog
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from structlog.types import Processor

from dataplane.runtime.masked import MaskedStream


class LogSettings(BaseSettings):
    """How a process logs. Every name can be set as `TIDEPOOL_LOG_<NAME>` in the environment."""

    model_config = SettingsConfigDict(env_prefix="TIDEPOOL_LOG_", frozen=True, extra="ignore")

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is written"
    )
    format: Literal["console", "json"] = Field("console", description="lines for people, or one JSON object per line")


@contextmanager
def logging_to_stderr(settings: LogSettings) -> Iterator[None]:
    """Around a process: structlog, `logging`, warnings and uncaught errors all write to standard error in the same
    form, and secrets are masked. As JSON, so is each line that a library prints there by itself.
    """
    masked = MaskedStream(sys.stderr)
    _configure(settings, masked)
    # Kept after the end of the block: an error that nobody caught is reported when all blocks are left.
    sys.excepthook, threading.excepthook = _log_uncaught, _log_uncaught_of_thread
    if settings.format == "console":
        with redirect_stderr(cast("Any", masked)):
            yield
    else:
        with PrintedLines() as printed, redirect_stderr(printed):
            yield


def _configure(settings: LogSettings, stream: MaskedStream) -> None:
    target = cast("IO[str]", stream)
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, *_rendering(settings)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=cast("Any", target)),
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(settings)],
        )
    )
    logging.basicConfig(
        handlers=[handler], level=logging.INFO if level == logging.DEBUG else max(level, logging.WARNING)
    )
    logging.captureWarnings(capture=True)


def _rendering(settings: LogSettings) -> list[Processor]:
    """The last steps. Tracebacks are plain: drawn with every local variable they would block an event loop for minutes,
    and hold secrets.
    """
    if settings.format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]


class PrintedLines(io.TextIOBase):
    """A text stream in place of standard error: each line printed there becomes a warning of the log."""

    def __init__(self) -> None:
        self._begun = ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """Log the lines that are whole now, and keep the rest."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            structlog.get_logger().warning(line, logger="stderr")
        return len(text)

    def close(self) -> None:
        """Log a line that was begun and not ended."""
        if self._begun:
            self.write("\n")
        super().close()

    def fileno(self) -> int:
        """The real standard error's, for what writes below Python."""
        return sys.__stderr__.fileno() if sys.__stderr__ is not None else 2


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        structlog.get_logger().critical("uncaught error", exc_info=(kind, error, traceback))


def _log_uncaught_of_thread(caught: threading.ExceptHookArgs) -> None:
    if caught.exc_value is not None:
        thread = caught.thread.name if caught.thread else "?"
        error = (caught.exc_type, caught.exc_value, caught.exc_traceback)
        structlog.get_logger().critical("uncaught error in a thread", thread=thread, exc_info=error)
