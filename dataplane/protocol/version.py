"""The installed version of Tidepool, by which gateways and agents of different versions are told apart."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def tidepool_version() -> str | None:
    """The package's version; None: it is not installed."""
    try:
        return version("tidepool")
    except PackageNotFoundError:
        return None
