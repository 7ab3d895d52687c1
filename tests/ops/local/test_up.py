"""`tidepool up` waits without a request of its own: a probe would count as demand and as a late answer."""

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from ops.client.api import Api
from ops.local.up import wait_served

ENDPOINTS = [
    {"model": "sardine", "region": "north", "instances_min": 1},
    {"model": "herring", "region": "north", "instances_min": 1},
    {"model": "idle", "region": "north", "instances_min": 0},
]
INSTANCES = [
    {"model": "sardine", "state": "failed", "error": "no such file", "waits_for": None},
    {"model": "herring", "state": "loading", "error": None, "waits_for": "its weights are loaded"},
    {"model": "idle", "state": "loading", "error": None, "waits_for": "nothing that matters"},
]


def _live(utilization: dict[str, float | None]) -> dict[str, Any]:
    rows = [{"model": model, "region": "north", "utilization": value} for model, value in utilization.items()]
    return {"endpoints": rows}


def _api(answer: Callable[[httpx.Request], Any]) -> Api:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answer(request)))
    return Api(httpx.Client(base_url="http://gateway", transport=transport))


def test_up_waits_for_usable_instances_and_asks_no_model_anything() -> None:
    asked: list[str] = []
    views = iter(
        [
            {"sardine": None, "herring": None, "idle": None},
            {"sardine": 0.0, "herring": None, "idle": None},
            {"sardine": 0.0, "herring": 0.5, "idle": None},
        ]
    )

    def answer(request: httpx.Request) -> Any:
        asked.append(f"{request.method} {request.url.path}")
        if request.url.path == "/admin/endpoints":
            return {"data": ENDPOINTS, "has_more": False}
        if request.url.path == "/admin/instances":
            return {"data": INSTANCES, "has_more": False}
        return _live(next(views))

    said: list[str] = []
    assert wait_served(_api(answer), said.append, poll_s=0.0) == []
    look = ["GET /admin/endpoints", "GET /admin/status/live"]
    assert asked == [*look, "GET /admin/instances"] * 2 + look
    assert said == [
        "2 models are not served yet: its weights are loaded, no such file",
        "1 models are not served yet: its weights are loaded",
    ]


def test_up_names_the_models_that_nothing_serves() -> None:
    def answer(request: httpx.Request) -> Any:
        if request.url.path == "/admin/endpoints":
            return {"data": ENDPOINTS, "has_more": False}
        return _live({"sardine": None, "herring": 0.0})

    assert wait_served(_api(answer), pytest.fail, patience_s=-1.0) == ["sardine"]
