"""Times and durations on the command line."""

from datetime import UTC, datetime, timedelta

import typer

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration_s(text: str) -> int:
    """Seconds of a duration such as 90s, 30m, 1h or 2d.

    Raises:
        typer.BadParameter: it is none.
    """
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit()) or unit not in _UNIT_S:
        raise typer.BadParameter(f"'{text}' is no duration such as 90s, 30m, 1h or 2d")
    return int(number) * _UNIT_S[unit]


def time_of(text: str) -> datetime:
    """A time in ISO 8601; one without a zone is UTC.

    Raises:
        typer.BadParameter: it is none.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"'{text}' is no time; write it like 2026-11-27T18:00Z") from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def since(text: str) -> datetime:
    """A time, or how long ago it was.

    Raises:
        typer.BadParameter: it is neither.
    """
    try:
        if text[-1:] not in _UNIT_S or "-" in text:
            return time_of(text)
        return datetime.now(UTC) - timedelta(seconds=duration_s(text))
    except typer.BadParameter:
        raise typer.BadParameter(f"'{text}' is neither a time, 2026-11-27T18:00Z, nor how long ago, 2h") from None
    except OverflowError:
        raise typer.BadParameter(f"'{text}' ago is before the year 1") from None


def utc_text(iso: str | None) -> str:
    """A time of the API in UTC, to the second."""
    return "-" if iso is None else datetime.fromisoformat(iso).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
