"""The Postgres schema. Promises are constraints here; what a row may become is in `policies.lifecycle`.

Times of events are `timestamptz`. Batches, demand and plans have tables in modules of their own.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    String,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from controlplane.policies.engines import Engine
from controlplane.policies.lifecycle import InstanceState
from dataplane.protocol.messages import EngineChoice, EngineKind, Task
from dataplane.protocol.tiers import InstanceKind

Json = dict[str, Any]


class Base(DeclarativeBase):
    """Declarative base with constraint names that migrations can rely on."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a plain class attribute
        int: BigInteger,
        str: String,
        datetime: DateTime(timezone=True),
        Json: JSONB,
        list[Any]: JSONB,
    }


def one_of(column: str, states: type[StrEnum]) -> CheckConstraint:
    """A check that `column` holds one of `states`."""
    values = ", ".join(f"'{state.value}'" for state in states)
    return CheckConstraint(f"{column} IN ({values})", name=f"{column}_known")


class Role(StrEnum):
    """What a key may do: each role may do all that the next one may, but `client` and `node` are separate."""

    ADMIN = "admin"
    OPERATOR = "operator"
    VIEWER = "viewer"
    CLIENT = "client"
    NODE = "node"


class Desired(StrEnum):
    """What the control plane wants of an instance. A donated (spot) one stays loaded for a lessee and gets no requests
    of ours.
    """

    RUNNING = "running"
    DRAINING = "draining"
    SPOT = "spot"
    STOPPED = "stopped"


class Owned:
    """What a fleet's file may make. `owner`: the name under which one did; None: it was made by hand."""

    owner: Mapped[str | None]


class Fleet(Base):
    """One row. `index` rises with every change that people or nodes make and a plan depends on, not with scaling;
    whoever changes the fleet locks it. `version` rises with every change, scaling's too, so that scaling sees whether
    what it decided on has changed. `created_at`: since when loops are expected to run.
    """

    __tablename__ = "fleet"
    __table_args__ = (CheckConstraint("id = 1", name="single"),)
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    index: Mapped[int] = mapped_column(server_default=text("0"))
    version: Mapped[int] = mapped_column(server_default=text("0"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Region(Owned, Base):
    """A region. Traffic that cannot stay at home tries the others by rising `position`."""

    __tablename__ = "regions"
    name: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class RegionLatency(Owned, Base):
    """How far one region is from another, for requests that cannot stay at home."""

    __tablename__ = "region_latencies"
    __table_args__ = (CheckConstraint("ms >= 0", name="positive"),)
    origin: Mapped[str] = mapped_column(ForeignKey("regions.name", ondelete="CASCADE"), primary_key=True)
    destination: Mapped[str] = mapped_column(ForeignKey("regions.name", ondelete="CASCADE"), primary_key=True)
    ms: Mapped[float]


class GpuType(Owned, Base):
    """A kind of GPU and what one costs."""

    __tablename__ = "gpu_types"
    __table_args__ = (CheckConstraint("memory_bytes > 0 AND cost_per_hour >= 0", name="positive"),)
    name: Mapped[str] = mapped_column(primary_key=True)
    memory_bytes: Mapped[int]
    cost_per_hour: Mapped[float]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Node(Base):
    """A machine with GPUs of one type, run by one agent. `generation` counts changes of what it shall hold.
    `host_bytes`: its model cache in host memory; None: its agent is too old to report it. `dtype`: what weights are
    converted to; None: they stay as stored, or its agent is too old to report it. `version`, `engine_version`: of
    Tidepool and of the engine there; None: not installed as a package, or its agent is too old to report it.
    `draining`: an operator takes it out of service; `leaving`: its agent is shutting down. `regroups`: its GPUs may be
    grouped into other slots; `layout`: the slots' sizes that are wanted, since `layout_at`; None: those that it has.
    `layout_held`: an operator chose them, and plans leave them; `layout_chosen_at`: when they were last chosen.
    """

    __tablename__ = "nodes"
    __table_args__ = (
        CheckConstraint("host_bytes > 0", name="host_bytes_positive"),
        CheckConstraint("(layout IS NULL) = (layout_at IS NULL)", name="layout_since"),
    )
    name: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(ForeignKey("regions.name"))
    gpu_type: Mapped[str] = mapped_column(ForeignKey("gpu_types.name"))
    url: Mapped[str]
    engine: Mapped[EngineKind] = mapped_column(String)
    host_bytes: Mapped[int | None]
    dtype: Mapped[str | None]
    version: Mapped[str | None]
    engine_version: Mapped[str | None]
    draining: Mapped[bool] = mapped_column(server_default=text("false"))
    leaving: Mapped[bool] = mapped_column(server_default=text("false"))
    regroups: Mapped[bool] = mapped_column(default=False, server_default=text("false"))
    layout: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    layout_at: Mapped[datetime | None]
    layout_held: Mapped[bool] = mapped_column(default=False, server_default=text("false"))
    layout_chosen_at: Mapped[datetime | None]
    generation: Mapped[int] = mapped_column(server_default=text("0"))
    last_seen_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    @property
    def accepting(self) -> bool:
        """Whether new instances may be placed there."""
        return not (self.draining or self.leaving)


class Slot(Base):
    """GPUs of a node that serve as one, in equal shares of its `workers`; an instance is loaded on every worker.
    `weights_bytes`: memory for weights of each worker; `hosts`: that the GPUs are of. None: its agent is too old to
    report it.
    """

    __tablename__ = "slots"
    __table_args__ = (
        CheckConstraint("gpus > 0 AND memory_bytes > 0", name="positive"),
        CheckConstraint("workers > 0 AND gpus % workers = 0", name="workers_share_gpus"),
        CheckConstraint("weights_bytes > 0", name="weights_bytes_positive"),
        CheckConstraint("hosts > 0", name="hosts_positive"),
    )
    node: Mapped[str] = mapped_column(ForeignKey("nodes.name", ondelete="CASCADE"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    gpus: Mapped[int]
    workers: Mapped[int] = mapped_column(default=1, server_default=text("1"))
    memory_bytes: Mapped[int]
    weights_bytes: Mapped[int | None]
    hosts: Mapped[int | None]


class Model(Owned, Base):
    """An LLM. `path` is a checkpoint folder that nodes can read. `parameters`: elements of its weights, tied ones once;
    None: not known. `slo`: `ttft_s` and `tbt_s` by tier, where they differ
    from the settings. `engine`: what its dedicated instances run on; auto: `policies.engines` decides. `task`: what it
    answers with. `tool_parser`, `reasoning_parser`: see `ModelSpec`. `base`: the model to which it is a LoRA adapter;
    `path` and sizes are then the adapter's own, those of the KV and the context the base's. `with_base`: each instance
    of its base serves it too, wherever that is; it has no endpoints and no instances of its own.
    """

    __tablename__ = "models"
    __table_args__ = (
        CheckConstraint("weights_bytes > 0 AND context_tokens > 0", name="positive"),
        CheckConstraint("parameters > 0", name="parameters_positive"),
        CheckConstraint("engine IN ('auto', 'torch', 'vllm')", name="engine"),
        CheckConstraint("task IN ('generate', 'embed', 'score')", name="task"),
        CheckConstraint("NOT with_base OR base IS NOT NULL", name="with_base_of_one"),
    )
    name: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str]
    architecture: Mapped[str]
    weights_bytes: Mapped[int]
    parameters: Mapped[int | None]
    kv_bytes_per_token: Mapped[int]
    context_tokens: Mapped[int]
    slo: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    engine: Mapped[EngineChoice] = mapped_column(String, default="auto", server_default=text("'auto'"))
    task: Mapped[Task] = mapped_column(String, default="generate", server_default=text("'generate'"))
    tool_parser: Mapped[str | None]
    reasoning_parser: Mapped[str | None]
    base: Mapped[str | None] = mapped_column(ForeignKey("models.name"))
    with_base: Mapped[bool] = mapped_column(default=False, server_default=text("false"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Profile(Owned, Base):
    """A model on a GPU type: input tokens/s of one instance at its SLO, its GPUs, and its load time in the region.
    `latency`: its step and switch times, named as in `policies.placement.pools.PoolLoad`; None: not known.
    `engine_rates`: tokens/s measured of both engines, by their names; None: not measured.
    """

    __tablename__ = "profiles"
    __table_args__ = (CheckConstraint("tokens_per_s > 0 AND gpus > 0 AND load_time_s >= 0", name="positive"),)
    model: Mapped[str] = mapped_column(ForeignKey("models.name", ondelete="CASCADE"), primary_key=True)
    gpu_type: Mapped[str] = mapped_column(ForeignKey("gpu_types.name"), primary_key=True)
    tokens_per_s: Mapped[float]
    gpus: Mapped[int]
    load_time_s: Mapped[float]
    latency: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    engine_rates: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))


class LoopRun(Base):
    """When a loop last succeeded and last failed, and in which process (host:pid) it last ran."""

    __tablename__ = "loop_runs"
    loop: Mapped[str] = mapped_column(primary_key=True)
    last_success_at: Mapped[datetime | None]
    last_failure_at: Mapped[datetime | None]
    last_error: Mapped[str | None]
    last_process: Mapped[str]


class EngineFailureRow(Base):
    """A model failed on an engine on a GPU type: how often, and the error its node last reported."""

    __tablename__ = "engine_failures"
    __table_args__ = (
        CheckConstraint("engine IN ('torch', 'vllm')", name="engine_known"),
        CheckConstraint("times > 0", name="positive"),
    )
    model: Mapped[str] = mapped_column(ForeignKey("models.name", ondelete="CASCADE"), primary_key=True)
    gpu_type: Mapped[str] = mapped_column(ForeignKey("gpu_types.name"), primary_key=True)
    engine: Mapped[Engine] = mapped_column(String, primary_key=True)
    times: Mapped[int]
    failed_at: Mapped[datetime]
    error: Mapped[str]


class EndpointRow(Owned, Base):
    """A model in a region, and how many instances it may have.

    `settled`: instances by GPU type that it was to have when none was stuck last; None: not known. `unplaced`: what the
    last run of scaling found no place for, as `gpu_type` (None: any), `count` and `reason`; None: all is placed.
    """

    __tablename__ = "endpoints"
    __table_args__ = (CheckConstraint("0 <= instances_min AND instances_min <= instances_max", name="limits"),)
    model: Mapped[str] = mapped_column(ForeignKey("models.name"), primary_key=True)
    region: Mapped[str] = mapped_column(ForeignKey("regions.name"), primary_key=True)
    instances_min: Mapped[int]
    instances_max: Mapped[int]
    last_scaled_at: Mapped[datetime | None]
    settled: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    unplaced: Mapped[list[Json] | None] = mapped_column(JSONB(none_as_null=True))


class Instance(Base):
    """One copy of a model on a slot: its desired state and what its node last reported.

    `kind`: which requests it is for. `donate`: when it has drained it becomes a donated instance instead of being
    stopped; `spot_at`: since when it is one. `pooled`: it shares the GPUs of its slot with others and has none of its
    own. `engine`: the one it is assigned, and why; auto: its node decides; `came_from`: the one before.
    `succeeds`: the instance that it replaces, whose node is leaving. `waits_for`: what keeps it from serving.
    """

    __tablename__ = "instances"
    __table_args__ = (
        one_of("desired", Desired),
        one_of("observed", InstanceState),
        one_of("kind", InstanceKind),
        CheckConstraint("engine IN ('auto', 'torch', 'vllm')", name="engine_known"),
        CheckConstraint("came_from IN ('torch', 'vllm')", name="came_from_known"),
        CheckConstraint("(desired = 'spot') = (spot_at IS NOT NULL)", name="spot_since"),
        CheckConstraint("NOT donate OR desired = 'draining'", name="donate_while_draining"),
        CheckConstraint("gpus >= 0 AND pooled = (gpus = 0)", name="pooled_takes_no_gpus"),
        CheckConstraint("NOT pooled OR (desired <> 'spot' AND NOT donate)", name="pooled_is_never_lent"),
        ForeignKeyConstraint(["node", "slot"], ["slots.node", "slots.index"]),
        ForeignKeyConstraint(["model", "region"], ["endpoints.model", "endpoints.region"]),
        Index("ix_instances_live", "node", postgresql_where=text("desired <> 'stopped'")),
        Index("ix_instances_model", "model", "region", postgresql_where=text("desired <> 'stopped'")),
        Index("ix_instances_succeeds", "succeeds", postgresql_where=text("succeeds IS NOT NULL")),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    region: Mapped[str]
    gpu_type: Mapped[str] = mapped_column(ForeignKey("gpu_types.name"))
    node: Mapped[str]
    slot: Mapped[int]
    gpus: Mapped[int]
    pooled: Mapped[bool] = mapped_column(server_default=text("false"))
    desired: Mapped[str]
    observed: Mapped[str]
    kind: Mapped[str] = mapped_column(server_default=text("'mixed'"))
    engine: Mapped[EngineChoice] = mapped_column(String, default="auto", server_default=text("'auto'"))
    engine_reason: Mapped[str | None]
    came_from: Mapped[Engine | None] = mapped_column(String)
    donate: Mapped[bool] = mapped_column(server_default=text("false"))
    error: Mapped[str | None]
    waits_for: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())
    spot_at: Mapped[datetime | None]
    succeeds: Mapped[str | None] = mapped_column(ForeignKey("instances.id", ondelete="SET NULL"))


class LeaseEnd(StrEnum):
    """Why a lease of a donated instance ended. Lost: its node or the instance was lost."""

    RETURNED = "returned"
    EXPIRED = "expired"
    RECLAIMED = "reclaimed"
    LOST = "lost"


class InstanceLease(Base):
    """Use of a donated instance for some time. `reclaim_at`: notice was given, the lease ends then at the latest."""

    __tablename__ = "spot_leases"
    __table_args__ = (
        one_of("end_reason", LeaseEnd),
        CheckConstraint("expires_at >= created_at", name="expires_later"),
        CheckConstraint("(ended_at IS NULL) = (end_reason IS NULL)", name="ended_for_a_reason"),
        Index("uq_spot_leases_active", "instance_id", unique=True, postgresql_where=text("ended_at IS NULL")),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    instance_id: Mapped[str] = mapped_column(ForeignKey("instances.id", ondelete="CASCADE"))
    holder: Mapped[str]
    created_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    reclaim_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None]
