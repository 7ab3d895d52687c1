"""The control plane's fixtures, for tests of what drives it from outside."""

from tests.controlplane.conftest import database_url, plain_tracebacks, settings, template_database

__all__ = ["database_url", "plain_tracebacks", "settings", "template_database"]
