"""The control plane's fixtures, for tests of what drives it from outside."""

from tests.controlplane.conftest import database_url, settings, template_database

__all__ = ["database_url", "settings", "template_database"]
