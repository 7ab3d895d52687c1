"""The description of the API, from which the console's client is generated."""

import json

from controlplane.api.app import make_app
from controlplane.settings import Settings


def openapi_document() -> str:
    """OpenAPI as JSON. Its order is that of the code, so that a change of one endpoint changes its lines alone."""
    return json.dumps(make_app(Settings()).openapi(), indent=1, ensure_ascii=False) + "\n"
