"""Commands that are a process of Tidepool, and `migrate`. Each imports what it runs only when it runs."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.client.api import CommandError

Tiny = Annotated[
    bool, typer.Option("--tiny", help="Tiny models only: download no pretrained model (93 MB, once, into ~/.cache).")
]


@examples("tidepool up --port 8080", "tidepool up --regions 3 --tiny")
def up(
    home: Annotated[
        Path, typer.Option(envvar="TIDEPOOL_HOME", help="Folder for data, keys and logs.", file_okay=False)
    ] = Path("~/.tidepool"),
    port: Annotated[int, typer.Option(envvar="TIDEPOOL_PORT", min=1, max=65535, help="Port of the API.")] = 8080,
    bare: Annotated[bool, typer.Option("--bare", help="No demo fleet and no agents.")] = False,
    tiny: Tiny = False,
    regions: Annotated[
        int, typer.Option(min=1, max=3, help="3: each region of the demo has its own Postgres, Valkey and API.")
    ] = 1,
) -> None:
    """Run everything on this machine until Ctrl-C.

    \b
    Starts Postgres, Valkey, the API, the dispatcher, Celery and one agent for each region of a small demo fleet.
    TIDEPOOL_DATABASE_URL and TIDEPOOL_REDIS_URL name servers to use instead.
    With --regions 3 commits wait for a second region; `tidepool failover REGION` moves the primary.
    """
    if regions == 2:
        raise CommandError("--regions: 1 or 3; with 2, every loss of a region would stop writes")
    if regions == 3 and bare:
        raise CommandError("--bare: not with --regions 3, which are the demo's")
    with running():
        from ops.local.up import up as run_up

        run_up(home, port, bare=bare, tiny=tiny, regional=regions == 3)


@examples("tidepool demo", "tidepool demo --demand week.csv", "tidepool demo --tiny")
def demo(
    demand: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Your own demand, CSV, instead of generated.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Let it run on until Ctrl-C, and keep its home folder.")] = False,
    tiny: Tiny = False,
) -> None:
    """Run the main job once, end to end, and stop."""
    with running():
        from ops.local.demo.run import main as run_demo

        run_demo(demand=demand, keep=keep, tiny=tiny)


@examples("TIDEPOOL_PORT=8080 tidepool api", "tidepool api --processes 4")
def api(
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Processes that share the port; else TIDEPOOL_API_PROCESSES."),
    ] = None,
    group: Annotated[Path | None, typer.Option(hidden=True, help="Folder of the group that this one is of.")] = None,
    number: Annotated[int, typer.Option(hidden=True, min=0, help="Its number in the group.")] = 0,
) -> None:
    """Run the API process: gateway, Files and Batch API, admin and node API. Settings: TIDEPOOL_*.

    \b
    With several processes, one that ends or hangs is started again; SIGTERM ends all when their streams have ended.
    """
    with running():
        import structlog

        from controlplane.api.app import serve
        from controlplane.api.process_group import GroupMember
        from controlplane.errors import SchemaError
        from controlplane.settings import Settings
        from controlplane.store.schema import check_schema_at_start

        settings = Settings()
        if group is None and (count := processes or settings.api_processes) > 1:
            from ops.local.api_processes import run_api_processes

            run_api_processes(settings.host, settings.port, count, silence_max_s=settings.api_process_silence_max_s)
            return
        try:
            check_schema_at_start(settings)
        except SchemaError as error:  # `/readyz` reports it too until the database is migrated
            structlog.get_logger().error(error.message)
        serve(settings, None if group is None else GroupMember(folder=group, number=number))


@examples("tidepool dispatcher")
def dispatcher() -> None:
    """Run the queue manager of batch requests. Settings: TIDEPOOL_*."""
    with running():
        from controlplane.dispatcher import serve
        from controlplane.settings import Settings
        from controlplane.store.schema import check_schema_at_start

        settings = Settings()
        check_schema_at_start(settings)
        serve(settings)


@examples("tidepool worker")
def worker() -> None:
    """Run a Celery worker: measure, plan, scale, expire. Settings: TIDEPOOL_*."""
    with running():
        from controlplane.planner.processes import serve_worker

        _check_planner_schema()
        serve_worker()


@examples("tidepool forecaster")
def forecaster() -> None:
    """Run a Celery worker that forecasts and runs what-if simulations; more of them forecast more series an hour.

    \b
    Settings: TIDEPOOL_*.
    """
    with running():
        from controlplane.planner.processes import serve_worker
        from controlplane.planner.schedule import FORECAST_QUEUE, WHAT_IF_QUEUE, process_settings

        _check_planner_schema()
        # two processes for forecasts remain, however many simulations run
        serve_worker(FORECAST_QUEUE, WHAT_IF_QUEUE, concurrency=2 + process_settings().what_if_running_max)


@examples("tidepool beat")
def beat() -> None:
    """Run the clock that starts the loops. Settings: TIDEPOOL_*."""
    with running():
        from controlplane.planner.processes import serve_beat

        _check_planner_schema()
        serve_beat()


@examples(
    "TIDEPOOL_AGENT_NODE=n1 TIDEPOOL_AGENT_REGION=us-east TIDEPOOL_AGENT_GPU_TYPE=H800 \\\n"
    """TIDEPOOL_AGENT_SLOTS='[{"gpus": 1, "memory_bytes": 80000000000}]' TIDEPOOL_AGENT_NODE_KEY=... tidepool agent"""
)
def agent(
    forget_term: Annotated[
        bool,
        typer.Option(
            "--forget-term",
            help="Obey any term of the primary next: the node has moved to another installation. Start so once.",
        ),
    ] = False,
) -> None:
    """Run the agent of this node. Settings: TIDEPOOL_AGENT_*."""
    with running():
        from dataplane.agent import newest_term
        from dataplane.agent.process import run_agent
        from dataplane.agent.settings import AgentSettings

        settings = AgentSettings()
        if forget_term and settings.state_dir is not None:
            newest_term.forget_term(settings.state_dir)
        run_agent(settings)


@examples("TIDEPOOL_DATABASE_URL=postgresql+psycopg://me@db/tidepool tidepool migrate")
def migrate(
    revision: Annotated[str, typer.Argument(help="The target revision.")] = "head",
) -> None:
    """Migrate the database TIDEPOOL_DATABASE_URL to the newest schema. Safe to run twice, or twice at once."""
    with running():
        import migrations
        from controlplane.settings import Settings
        from ops.client.home import home_of, refuse_home_of_up

        refuse_home_of_up(home_of(os.environ), os.environ)
        migrations.upgrade(Settings().database_url.get_secret_value(), revision)


def _check_planner_schema() -> None:
    from controlplane.planner.schedule import process_settings
    from controlplane.store.schema import check_schema_at_start

    check_schema_at_start(process_settings())


@contextmanager
def running() -> Iterator[None]:
    """Configure logs and tracing around a process, and turn known errors into CommandError."""
    import structlog

    from dataplane.runtime.logs import LogSettings, logging_to_stderr
    from dataplane.runtime.tracing import start_tracing
    from ops.cli.unknown_settings import unknown_settings

    with _explained():
        settings = LogSettings()
    with logging_to_stderr(settings):
        try:
            with _explained():
                for complaint in unknown_settings(os.environ):
                    structlog.get_logger().warning(complaint)
                start_tracing(f"tidepool-{sys.argv[1]}" if len(sys.argv) > 1 else "tidepool")
                yield
        except CommandError as error:
            if settings.format != "json":
                raise
            structlog.get_logger().critical(str(error))
            raise SystemExit(1) from error


_PREFIXES = {
    "Settings": "TIDEPOOL_",
    "AgentSettings": "TIDEPOOL_AGENT_",
    "HostSettings": "TIDEPOOL_AGENT_",
    "LogSettings": "TIDEPOOL_LOG_",
}


@contextmanager
def _explained() -> Iterator[None]:
    """Report invalid settings, a busy port or an unavailable server in one line instead of a traceback."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from controlplane.errors import InvalidValueError, SchemaError
    from dataplane.protocol.errors import DataplaneError
    from dataplane.runtime.masked import mask
    from dataplane.runtime.tracing import TracingError
    from ops.client.home import EmbeddedError
    from ops.local.supervisor import SupervisorError

    try:
        yield
    except ValidationError as error:
        raise CommandError(_invalid(error.errors()[0], _PREFIXES.get(error.title, ""))) from error
    except SettingsError as error:
        raise CommandError(_undecoded(error)) from error
    except (
        EmbeddedError,
        SupervisorError,
        TracingError,
        InvalidValueError,
        SchemaError,
        DataplaneError,
        OSError,
    ) as error:
        raise CommandError(mask(str(error))) from error
    except _database_errors() as error:
        raise CommandError(mask(f"the database: {str(error).splitlines()[0]}")) from error


def _invalid(fault: Mapping[str, Any], prefix: str) -> str:
    """What is wrong with a setting, or with several together, whose fields the message then names."""
    message = fault["msg"].removeprefix("Value error, ")
    if fault["loc"]:
        name, *place = map(str, fault["loc"])
        return f"setting {'.'.join([prefix + name.upper(), *place])}: {message}"
    from ops.cli.unknown_settings import known_settings

    known = known_settings()

    def named(field: re.Match[str]) -> str:
        setting = prefix + field[0].upper()
        return setting if setting in known else field[0]

    return f"settings: {re.sub(r'(?<![^ ])[a-z]+(_[a-z]+)+', named, message)}"


def _undecoded(error: Exception) -> str:
    """What is wrong with a setting whose value must be JSON. Pydantic's error names the field alone."""
    named = re.search(r'field "(\w+)"', str(error))
    if named is None:
        return str(error)
    name = named[1].upper()
    given = {each.upper() for each in os.environ}
    prefix = next((prefix for prefix in _PREFIXES.values() if prefix + name in given), "")
    return f"setting {prefix}{name}: must be JSON: {error.__cause__}"


def _database_errors() -> tuple[type[Exception], ...]:
    """SQLAlchemy's; none where it is not installed, as on a node."""
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError:
        return ()
    return (SQLAlchemyError,)
