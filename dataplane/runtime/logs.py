"""Logs of all processes, of the control plane and of nodes: on standard error, with secrets masked, as text or JSON.

All processes read `TIDEPOOL_LOG_LEVEL` and `TIDEPOOL_LOG_FORMAT`. Libraries log from `warning` on; at `debug`, from
`info` on.
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
    """Settings of logs. Every name can be set as `TIDEPOOL_LOG_<NAME>` in the environment."""

    model_config = SettingsConfigDict(env_prefix="TIDEPOOL_LOG_", frozen=True, extra="ignore")

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is written"
    )
    format: Literal["console", "json"] = Field("console", description="lines for people, or one JSON object per line")


@contextmanager
def logging_to_stderr(settings: LogSettings) -> Iterator[None]:
    """For the run of a process: structlog, `logging`, warnings and uncaught errors write to standard error in one
    format with secrets masked. With `json`, lines that a library prints there become JSON too.
    """
    masked = MaskedStream(sys.stderr)
    _configure(settings, masked)
    # The hooks remain after the block: Python reports an uncaught error when all blocks have ended.
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
    """The last processors. Tracebacks are plain: with all local variables, rendering one blocks an event loop for
    minutes and shows secrets.
    """
    if settings.format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]


class PrintedLines(io.TextIOBase):
    """A text stream that replaces standard error and logs each line as a warning."""

    def __init__(self) -> None:
        self._partial_line = ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Log the complete lines and keep the rest."""
        with self._lock:
            *lines, self._partial_line = (self._partial_line + text).split("\n")
        for line in filter(str.strip, lines):
            structlog.get_logger().warning(line, logger="stderr")
        return len(text)

    def close(self) -> None:
        """Log a last line without an end."""
        if self._partial_line:
            self.write("\n")
        super().close()

    def fileno(self) -> int:
        """The descriptor of the real standard error, for native code and child processes."""
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
