"""The schedule of the loops, run by Celery. Every task is safe to run twice, or concurrently."""

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from celery import Celery, group, signals
from celery.exceptions import SoftTimeLimitExceeded
from celery.schedules import crontab, schedule
from kombu.exceptions import OperationalError

from controlplane.errors import UnavailableError
from controlplane.planner.compare import compare
from controlplane.planner.correct import correct, observe
from controlplane.planner.expire import expire, sweep
from controlplane.planner.forecast import forecast_one, series_to_forecast
from controlplane.planner.measure import measure
from controlplane.planner.plan import plan_hour
from controlplane.planner.predict import predict
from controlplane.planner.rollouts import move_rollouts
from controlplane.planner.runs import note, noted
from controlplane.planner.scale import scale
from controlplane.planner.what_if.run import run_next
from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import PlanState
from controlplane.policies.readiness import Loop
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.open import open_blobs
from controlplane.store.plans import newest_scheduled
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine, server_time_s
from controlplane.store.what_if import is_waiting

log = structlog.get_logger()
_VISIBILITY_TIMEOUT_S = 3600
_BROKER_TIMEOUT_S = 10
"""A broker that does not answer within this is unreachable."""
MAIN_QUEUE, FORECAST_QUEUE, WHAT_IF_QUEUE = "tidepool", "forecasts", "what-if"
_WHAT_IF_SLACK_S = 120
"""What a what-if task may take besides its simulation."""
_UNPLACED_LOGGED = 3
"""Endpoints with unplaced instances that are named in the log of each run; `tidepool status` names all."""
_FORECAST_TASKS = 256
"""Forecast tasks of an hour while each has few series: enough to keep so many workers busy."""


@functools.cache
def process_settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()


def _pulse(process: Loop, queue: str, every_s: float) -> dict[str, object]:
    """A task whose runs prove that the workers of a queue are alive."""
    options = {"queue": queue, "expires": every_s}
    return {"task": "pulse", "schedule": schedule(every_s), "args": (process,), "options": options}


def _make_celery(settings: Settings) -> Celery:
    app = Celery("tidepool", broker=settings.redis_url.get_secret_value())
    app.conf.update(
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_serializer="json",
        accept_content=["json"],
        task_default_queue=MAIN_QUEUE,
        task_routes={"forecast_some": {"queue": FORECAST_QUEUE}, "what_if": {"queue": WHAT_IF_QUEUE}},
        task_soft_time_limit=900,
        task_time_limit=1000,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": _VISIBILITY_TIMEOUT_S,
            "global_keyprefix": "tidepool:celery:",
            "socket_connect_timeout": _BROKER_TIMEOUT_S,
            "socket_timeout": _BROKER_TIMEOUT_S,
            "socket_keepalive": True,
        },
        timezone="UTC",
        beat_scheduler="controlplane.planner.beat:BeatScheduler",
        beat_schedule={
            "pulse of workers": _pulse(Loop.WORKER, MAIN_QUEUE, settings.pulse_every_s),
            "pulse of forecasters": _pulse(Loop.FORECASTER, FORECAST_QUEUE, settings.pulse_every_s),
            "measure": {"task": "measure", "schedule": crontab(), "options": {"expires": 55}},
            "forecast": {"task": "forecast", "schedule": crontab(minute="50"), "options": {"expires": 600}},
            "correct": {"task": "correct", "schedule": crontab(minute="55"), "options": {"expires": 600}},
            "plan": {"task": "plan", "schedule": crontab(minute="58,3,8,13,18"), "options": {"expires": 600}},
            "sweep": {"task": "sweep", "schedule": crontab(minute="23"), "options": {"expires": 1800}},
            "scale": {
                "task": "scale",
                "schedule": schedule(settings.scale_every_s),
                "options": {"expires": settings.scale_every_s},
            },
            "predict": {
                "task": "predict",
                "schedule": schedule(settings.predict_every_s),
                "options": {"expires": settings.predict_every_s},
            },
            "roll_out": {
                "task": "roll_out",
                "schedule": schedule(settings.rollout_every_s),
                "options": {"expires": settings.rollout_every_s},
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


@signals.setup_logging.connect
def keep_logging(**_: object) -> None:
    """Keep the process's logging; without a receiver of this signal Celery installs its own."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The resources that the tasks of a worker process share."""

    settings: Settings
    database: Database
    live: LiveStore
    blobs: BlobStore


@functools.cache
def parts() -> Parts:
    """Created at the first task, so after the worker has forked."""
    settings = process_settings()
    return Parts(
        settings=settings,
        database=Database(make_engine(settings)),
        live=LiveStore(settings),
        blobs=open_blobs(settings),
    )


def _now_s() -> float:
    """The time for loops that compare it with rows: workers' clocks differ from the one that those were written by."""
    with parts().database.statement() as session:
        return server_time_s(session)


@celery.task(name="pulse")
def run_pulse(process: str) -> None:
    """Every 15 seconds, on each queue."""
    note(parts().database, Loop(process))


@signals.after_task_publish.connect(sender="pulse")
def note_beat(**_: object) -> None:
    """Store that beat has reached the broker."""
    note(parts().database, Loop.BEAT)


@celery.task(name="measure")
def run_measure() -> None:
    """Every minute."""
    with noted(parts().database, Loop.MEASURE):
        with parts().database.transaction(replicated=False) as session:
            measure(session, parts().live, now_s=time.time())
        with parts().database.transaction(replicated=False) as session:
            observe(session, parts().live, parts().settings, now_s=time.time())


@celery.task(name="forecast")
def run_forecast(origin_s: int | None = None) -> None:
    """Every hour, ten minutes before it ends: start tasks of some series each."""
    at_s = origin_s if origin_s is not None else int(time.time()) // 60 * 60
    with noted(parts().database, Loop.FORECAST):
        with parts().database.transaction() as session:
            endpoints = series_to_forecast(session, origin_s=at_s, settings=parts().settings)
        shares = share_out(endpoints, most=parts().settings.forecast_task_series_max)
        group(run_forecast_some.s([(e.model, e.region) for e in share], at_s) for share in shares).apply_async()


def share_out(endpoints: Sequence[Endpoint], *, most: int) -> list[Sequence[Endpoint]]:
    """Divide endpoints into shares of equal size, at most `most`: small shares of few endpoints, so that all workers
    have some, and large shares of many, so that the broker does not need a message for each.
    """
    size = min(most, max(1, math.ceil(len(endpoints) / _FORECAST_TASKS)))
    return [endpoints[at : at + size] for at in range(0, len(endpoints), size)]


@celery.task(name="forecast_some")
def run_forecast_some(series: list[tuple[str, str]], origin_s: int) -> None:
    """Forecast some series, one after another, each stored when it is done. A failing series does not affect the
    others; the plan makes or replaces the missing forecasts.
    """
    for model, region in series:
        endpoint = Endpoint(model=model, region=region)
        try:
            with parts().database.transaction(replicated=False) as session:
                forecast_one(session, endpoint, origin_s=origin_s, settings=parts().settings)
        except SoftTimeLimitExceeded:
            log.exception("forecasts out of time", origin_s=origin_s)
            return
        except Exception:
            log.exception("forecast failed", model=model, region=region, origin_s=origin_s)
        note(parts().database, Loop.FORECASTER)  # pulses wait until all series are done


@celery.task(name="correct")
def run_correct() -> None:
    """Every hour, three minutes before its plan is made."""
    with noted(parts().database, Loop.CORRECT):
        try:
            changed = correct(parts().database, parts().live, parts().settings, now_s=_now_s())
        finally:  # the comparison needs no Redis
            differing = compare(parts().database, parts().settings, now_s=_now_s())
            if differing:
                first = next(iter(differing.values()))
                log.warning("latency is not what profiles say", endpoints=len(differing), first=first)
    for pair, reason in changed.items():
        log.info("profile corrected", model=pair.model, gpu_type=pair.gpu_type, reason=reason)


@celery.task(name="plan")
def run_plan() -> None:
    """Every hour, two minutes before it begins."""
    with noted(parts().database, Loop.PLAN) as run:
        plan_id = plan_hour(parts().database, parts().settings, now_s=_now_s())
        with parts().database.transaction() as session:
            newest = newest_scheduled(session)
        if newest is not None and newest.id == plan_id and newest.state == PlanState.FAILED:
            run.error = newest.reason
    if plan_id is not None:
        log.info("plan made", plan=plan_id)
        run_scale.delay()


@celery.task(name="scale")
def run_scale() -> None:
    """Every 15 seconds, and after each plan."""
    with noted(parts().database, Loop.SCALE):
        scaled = scale(parts().database, parts().live, parts().settings, now_s=_now_s())
    if changes := scaled.changes():
        log.info("scaled", **changes)
    if unplaced := scaled.unplaced:
        log.warning("not placed", endpoints=len(unplaced), first=unplaced[:_UNPLACED_LOGGED])


@celery.task(name="predict")
def run_predict() -> None:
    """Every 15 seconds."""
    with noted(parts().database, Loop.PREDICT):
        predicted = predict(parts().database, parts().settings)
    if predicted["at_risk"]:
        log.warning("batches will miss their deadlines", **predicted)


@celery.task(name="roll_out")
def run_roll_out() -> None:
    """Every 5 seconds."""
    with noted(parts().database, Loop.ROLL_OUT):
        moved = move_rollouts(parts().database, parts().settings)
    for rollout, what in moved.items():
        log.info("a roll-out moved", rollout=rollout, what=what)


@celery.task(name="expire")
def run_expire() -> None:
    """Every 30 seconds."""
    with noted(parts().database, Loop.EXPIRE) as run:
        expired = expire(parts().database, parts().blobs, parts().settings)
        run.error = expired.error
    if done := expired.done():
        log.info("expired", **done)
    with parts().database.transaction() as session:
        waiting = is_waiting(session, running_max=parts().settings.what_if_running_max)
    if waiting:
        run_what_if.apply_async(expires=parts().settings.expire_every_s)


@celery.task(
    name="what_if",
    acks_late=False,  # who claimed the run is in Postgres: it is never run twice
    soft_time_limit=process_settings().what_if_time_max_s + _WHAT_IF_SLACK_S,
    time_limit=process_settings().what_if_time_max_s + 2 * _WHAT_IF_SLACK_S,
)
def run_what_if() -> None:
    """When an operator asks for a run, when one has ended, and every 30 seconds while one waits."""
    if run_next(parts().database, parts().live, parts().settings):
        run_what_if.delay()


@celery.task(name="sweep")
def run_sweep() -> None:
    """Every hour."""
    with noted(parts().database, Loop.SWEEP) as run:
        swept = sweep(parts().database, parts().blobs, parts().settings, now_s=time.time())
        run.error = swept.error
    if done := swept.done():
        log.info("swept", **done)


def enqueue(task: str, **arguments: object) -> bool:
    """Ask a worker to run a loop now, once. False while the broker is unreachable: the schedule runs it later."""
    try:
        parts().live.ping()  # Celery's own client would retry for seconds
        celery.send_task(task, kwargs=arguments, retry=False)
    except (UnavailableError, OperationalError) as error:
        log.warning("not enqueued", task=task, error=str(error))
        return False
    return True
