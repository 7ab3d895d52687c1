"""Beat while its broker is away: one line when that begins, one when it is over."""

import logging
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule as every
from celery.utils.imports import instantiate
from kombu import Connection
from structlog.testing import capture_logs

from controlplane.planner.schedule import celery
from ops.local.ports import LOOPBACK, free_port
from tests.controlplane.world import World


@pytest.fixture
def scheduler() -> Any:
    """The scheduler that beat uses, for a clock that has nothing to do."""
    app = Celery("test")
    app.conf.update(
        task_publish_retry=False, task_default_queue="beat-test", broker_transport_options={"socket_connect_timeout": 1}
    )
    return instantiate(celery.conf.beat_scheduler, app=app)


def test_an_absent_broker_is_two_lines_however_many_ticks_it_lasts(
    scheduler: Any, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    entry = ScheduleEntry(name="scale", task="scale", schedule=every(1.0), app=scheduler.app)
    hasty = {"max_retries": 0, "interval_start": 0, "interval_step": 0}
    away = Connection(f"redis://{LOOPBACK}:{free_port()}/0", transport_options=hasty)
    here = Connection(world.settings.redis_url.get_secret_value())

    def tick(connection: Connection, times: int) -> None:
        with connection.Producer(auto_declare=False) as producer:
            for _ in range(times):
                scheduler.apply_entry(entry, producer=producer)

    with caplog.at_level(logging.WARNING), capture_logs() as lines:
        for connection in (here, away, here, away, here):
            tick(connection, 3)
    away.release()
    here.release()
    logged = [(line["log_level"], line["event"]) for line in lines]
    down, up = ("warning", "the broker is away; no loop is started until it is back"), ("info", "the broker is back")
    assert logged == [down, up] * 2
    assert caplog.records == []


def test_what_is_no_outage_keeps_its_traceback(scheduler: Any, world: World) -> None:
    entry = ScheduleEntry(name="odd", task="odd", args=(object(),), schedule=every(1.0), app=scheduler.app)
    with (
        Connection(world.settings.redis_url.get_secret_value()) as here,
        here.Producer(auto_declare=False) as producer,
        capture_logs() as lines,
    ):
        scheduler.apply_entry(entry, producer=producer)
    assert [(line["event"], line["task"], line["exc_info"]) for line in lines] == [
        ("a loop was not started", "odd", True)
    ]
