"""The control plane's fixtures, for tests of what drives it from outside."""

from tests.controlplane.conftest import database, database_url, databases, plain_tracebacks, settings

__all__ = ["database", "database_url", "databases", "plain_tracebacks", "settings"]
