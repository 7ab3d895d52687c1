"""The clock and the workers: one table of loops, run by Celery. Tasks may run twice, or at once, and do no harm."""

import functools
import os
import time
from dataclasses import dataclass

import structlog
from celery import Celery, group
from celery.schedules import crontab, schedule
from kombu.exceptions import OperationalError

from controlplane.errors import UnavailableError
from controlplane.loops.expire import expire, sweep
from controlplane.loops.forecast import forecast_one, series_to_forecast
from controlplane.loops.measure import measure
from controlplane.loops.plan import plan_hour
from controlplane.loops.scale import scale
from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store.blobs import BlobStore
from controlplane.store.live import LiveStore
from controlplane.store.session import Database, make_engine

log = structlog.get_logger()
_VISIBILITY_TIMEOUT_S = 3600


@functools.cache
def process_settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()


def _make_celery(settings: Settings) -> Celery:
    app = Celery("tidepool", broker=settings.redis_url.get_secret_value())
    app.conf.update(
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_serializer="json",
        accept_content=["json"],
        task_default_queue="tidepool",
        task_routes={"forecast_one": {"queue": "forecasts"}},  # many and slow: others need not wait behind them
        task_soft_time_limit=900,
        task_time_limit=1000,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"visibility_timeout": _VISIBILITY_TIMEOUT_S, "global_keyprefix": "tidepool:celery:"},
        timezone="UTC",
        beat_scheduler="celery.beat:Scheduler",
        beat_schedule={
            "measure": {"task": "measure", "schedule": crontab(), "options": {"expires": 55}},
            "forecast": {"task": "forecast", "schedule": crontab(minute="50"), "options": {"expires": 600}},
            "plan": {"task": "plan", "schedule": crontab(minute="58,3,8,13,18"), "options": {"expires": 1800}},
            "sweep": {"task": "sweep", "schedule": crontab(minute="23"), "options": {"expires": 1800}},
            "scale": {
                "task": "scale",
                "schedule": schedule(settings.scale_every_s),
                "options": {"expires": settings.scale_every_s},
            },
            "expire": {
                "task": "expire",
                "schedule": schedule(settings.expire_every_s),
                "options": {"expires": settings.expire_every_s},
            },
        },
    )
    return app


celery = _make_celery(process_settings())


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What tasks of one worker process share."""

    settings: Settings
    database: Database
    live: LiveStore
    blobs: BlobStore


@functools.cache
def parts() -> Parts:
    """Made at the first task, so after the worker has forked."""
    settings = process_settings()
    return Parts(
        settings=settings,
        database=Database(make_engine(settings)),
        live=LiveStore(settings),
        blobs=BlobStore(settings.with_home() / "files"),
    )


@celery.task(name="measure")
def run_measure() -> None:
    """Every minute."""
    with parts().database.transaction() as session:
        measure(session, parts().live, now_s=time.time())


@celery.task(name="forecast")
def run_forecast(origin_s: int | None = None) -> None:
    """Every hour, ten minutes before it ends: one task for each series."""
    at_s = origin_s if origin_s is not None else int(time.time()) // 60 * 60
    with parts().database.transaction() as session:
        endpoints = series_to_forecast(session, origin_s=at_s, settings=parts().settings)
    group(run_forecast_one.s(endpoint.model, endpoint.region, at_s) for endpoint in endpoints).apply_async()


@celery.task(name="forecast_one")
def run_forecast_one(model: str, region: str, origin_s: int) -> None:
    """One series."""
    endpoint = Endpoint(model=model, region=region)
    with parts().database.transaction() as session:
        forecast_one(session, endpoint, origin_s=origin_s, settings=parts().settings)


@celery.task(name="plan")
def run_plan() -> None:
    """Every hour, two minutes before it begins."""
    plan_id = plan_hour(parts().database, parts().settings, now_s=time.time())
    if plan_id is not None:
        log.info("plan made", plan=plan_id)
        run_scale.delay()


@celery.task(name="scale")
def run_scale() -> None:
    """Every 15 seconds, and after each plan."""
    with parts().database.transaction() as session:
        scaled = scale(session, parts().live, parts().settings, now_s=time.time())
    if scaled.started or scaled.revived or scaled.drained or scaled.unplaced:
        log.info("scaled", started=scaled.started, revived=scaled.revived, drained=scaled.drained)
    for unplaced in scaled.unplaced:
        log.warning("not placed", what=unplaced)


@celery.task(name="expire")
def run_expire() -> None:
    """Every 30 seconds."""
    expired = expire(parts().database, parts().blobs, parts().settings, now_s=time.time())
    if expired.leases or expired.requests:
        log.info("expired", leases=expired.leases, requests=expired.requests)


@celery.task(name="sweep")
def run_sweep() -> None:
    """Every hour."""
    swept = sweep(parts().database, parts().blobs)
    if swept:
        log.info("swept", blobs=swept)


def enqueue(task: str, **arguments: object) -> bool:
    """Ask a worker to run a loop now, once. False while the broker is away: the loop's own clock will come."""
    try:
        parts().live.ping()  # Celery's own client would try for seconds before it gives up
        celery.send_task(task, kwargs=arguments, retry=False)
    except (UnavailableError, OperationalError) as error:
        log.warning("not enqueued", task=task, error=str(error))
        return False
    return True


def serve_worker() -> None:
    """Run a Celery worker until SIGTERM."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    celery.worker_main(
        [
            "worker",
            "--loglevel=WARNING",
            "--concurrency=2",
            "--without-gossip",
            "--without-mingle",
            "--queues=tidepool,forecasts",
        ]
    )


def serve_beat() -> None:
    """Run the clock until SIGTERM."""
    celery.start(["beat", "--loglevel=WARNING"])
