"""What tests of fetching leave behind."""

from collections.abc import Iterator

import pytest

from dataplane.checkpoints import hub


@pytest.fixture(autouse=True)
def _hub_client_as_it_was() -> Iterator[None]:
    """The hub's client is one for the process, and a fetch makes it keep a node's rules for good."""
    hub._check_redirects.cache_clear()
    yield
    if hub._check_redirects.cache_info().currsize:
        from huggingface_hub import set_client_factory  # noqa: PLC0415 - only where the torch extra is
        from huggingface_hub.utils._http import default_client_factory  # noqa: PLC0415

        hub._check_redirects.cache_clear()
        set_client_factory(default_client_factory)
