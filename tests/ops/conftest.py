"""The control plane's fixtures, for tests of what drives it from outside."""

from tests.controlplane.conftest import database_url, databases, plain_tracebacks, settings

__all__ = ["database_url", "databases", "plain_tracebacks", "settings"]
