"""The commands of `tidepool` and where each is defined: a file of commands is imported when one of them is run, so that
`--help` and a short command do not wait for the others.
"""

import math
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

COMMANDS = {
    "up": ("processes:up", "Run everything on this machine until Ctrl-C."),
    "demo": ("processes:demo", "Run the main job once, end to end, and stop."),
    "api": ("processes:api", "Run the API process: gateway, Files and Batch API, admin and node API."),
    "dispatcher": ("processes:dispatcher", "Run the queue manager of batch requests."),
    "worker": ("processes:worker", "Run a Celery worker: measure, plan, scale, expire."),
    "forecaster": (
        "processes:forecaster",
        "Run a Celery worker that forecasts and runs what-if simulations; more of them forecast more series an hour.",
    ),
    "beat": ("processes:beat", "Run the clock that starts the loops."),
    "agent": ("processes:agent", "Run the agent of this node."),
    "migrate": ("processes:migrate", "Migrate the database TIDEPOOL_DATABASE_URL to the newest schema."),
    "init": ("init:init", "Create the first keys (admin, client, node) without `tidepool up`."),
    "backup": ("backup:backup", "Back up the database, the files and keys.json while everything runs."),
    "restore": (
        "backup:restore",
        "Restore a backup while no process of Tidepool runs, and migrate it to this release's schema.",
    ),
    "failover": (
        "failover:failover",
        "Make a region's standby of Postgres the primary, and have the other standbys follow it.",
    ),
    "doctor": (
        "doctor:doctor",
        "Examine an installation: versions, clocks, ports, GPUs, space, keys, replication, loops, nodes, files.",
    ),
    "status": (
        "status:show_status",
        "Show the fleet: health, loops, regions, instances, batches, the plan in force.",
    ),
    "console": (
        "console:show_console",
        "Print a link to the web console that signs in once, within ten minutes, with the rights of the admin key.",
    ),
    "top": ("top:show_top", "Watch regions, endpoints, queues and objectives until Ctrl-C."),
    "events": ("events:show_events", "Show events of instances, nodes, plans and terms, the newest first."),
    "audit": (
        "audit:show_audit",
        "Show who changed what, the newest first; --json has the whole row before and after.",
    ),
    "usage": ("usage:show_usage", "Show requests and tokens, the newest first."),
    "logs": ("logs:show_logs", "Show the logs of `tidepool up` on this machine."),
    "apply": ("apply:apply_file", "Make the fleet and its tenants as a YAML file declares them."),
    "export": ("apply:export_file", "Print the YAML file that declares what is there."),
    "region": ("fleet:regions", "Regions, in the order that traffic prefers them."),
    "gpu": ("fleet:gpus", "GPU types, with memory and cost of one GPU."),
    "node": ("nodes:nodes", "Nodes: machines with GPUs that have joined the fleet."),
    "model": ("models:models", "Models: checkpoints in Hugging Face format, or GGUF files."),
    "alias": ("aliases:aliases", "Aliases: names that clients ask for, and the models that answer, by weight."),
    "rollout": ("rollouts:rollouts", "Roll-outs: another model replaces those of an alias, step by step."),
    "endpoint": ("fleet:endpoints", "Endpoints: models offered in regions."),
    "instance": ("fleet:instances", "Instances: copies of models on slots."),
    "spot": ("spot:spot", "Donated instances (spot): idle instances that others may lease."),
    "demand": ("demand:demands", "Demand: input tokens per second, by model, region and minute."),
    "forecast": ("demand:forecasts", "Forecasts of the coming hour's peaks."),
    "plan": ("plans:plans", "Plans: how many instances of what, where, for an hour."),
    "pin": ("pins:pins", "Replica overrides (pins): a fixed number of instances of an endpoint until a given time."),
    "batch": ("batches:batches", "Batches: offline jobs of many requests."),
    "request": ("requests:requests", "Interactive requests of the last day, with their outcomes."),
    "key": ("keys:keys", "API keys and their roles."),
    "tenant": ("tenants:tenants", "Tenants and their limits."),
    "term": ("terms:terms", "The term of the primary: nodes obey nobody of an older one."),
    "faults": ("faults:faults", "Inject faults into a stack under load, and check its guarantees."),
    "what-if": ("what_if:runs", "What-if runs: the running fleet simulated with changes, by its forecasters."),
    "simulate": ("simulate:simulations", "Simulate a fleet on the live service's own policies."),
}
"""Name -> its function or group in a file of this folder, and its line in `tidepool --help`."""


class GivenOption(TyperOption):
    """An option that coerces its value only if one is given. typer always coerces, for which it imports pydantic: 0.1 s
    of CPU. `inf` and `nan`, which Python reads as numbers, are refused.
    """

    def __init__(self, option: TyperOption) -> None:  # typer makes the options of a command itself
        vars(self).update(vars(option))

    def process_value(self, ctx: Any, value: Any) -> Any:
        if value is None and not (self.required or self.multiple):
            return None
        value = super().process_value(ctx, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise typer.BadParameter("must be a finite number", ctx=ctx, param=self)
        return value


def coerce_given_only(command: TyperCommand | TyperGroup, context: Any) -> None:
    """Replace the options of a command, and --help among them."""
    params = command.get_params(context)
    command.params = [GivenOption(each) if isinstance(each, TyperOption) else each for each in params]


class LazyCommand(TyperCommand):
    """A placeholder in the list of commands, which imports the command when it is run, explained or completed."""

    def __init__(self, name: str, source: str, help: str) -> None:
        super().__init__(name, help=help)
        self._source = source

    def load(self) -> Any:
        """The command or group itself."""
        module, _, attribute = self._source.partition(":")
        found = getattr(import_module(f"ops.cli.{module}"), attribute)
        holder = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=self.name)
        else:
            holder.command(self.name)(found)
        return typer.main.get_group(holder).commands[self.name or ""]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command itself, which is then the one that is run."""
        command = self.load()
        for each in (command, *getattr(command, "commands", {}).values()):
            coerce_given_only(each, parent)
        return command.make_context(info_name, args, parent, **extra)


class CommandTable(TyperGroup):
    """A group of the commands of the table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (source, line) in COMMANDS.items():
            self.add_command(LazyCommand(name, source, line))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        coerce_given_only(self, ctx)
        return super().parse_args(ctx, args)
