"""What instances did by windows of five minutes, and the corrections of profiles that follow from it."""

from collections.abc import Iterator, Mapping
from dataclasses import astuple
from datetime import UTC, datetime
from itertools import groupby

from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, Select, delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.policies.facts import EndpointGpu, ModelGpu
from controlplane.policies.latency_comparison import ReportedLoad
from controlplane.policies.profile_correction import WINDOW_S, Correction, LoadSums, LoadWindow
from controlplane.policies.step_correction import StepCorrection
from controlplane.store.rows import delete_some, require
from controlplane.store.tables import Base

_MINUTE_S = 60


class LoadWindowRow(Base):
    """Sums over observations of an endpoint's instances on a GPU type in five minutes (`LoadSums`). `observed_s`: the
    minute of the newest, so that none is counted twice.
    """

    __tablename__ = "load_windows"
    __table_args__ = (
        CheckConstraint("mod(start_s, 300) = 0", name="window"),
        CheckConstraint("instances > 0", name="observed"),
        Index("ix_load_windows_start_s", "start_s"),
    )
    model: Mapped[str] = mapped_column(primary_key=True)
    gpu_type: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    start_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    observed_s: Mapped[int]
    instances: Mapped[int]
    tokens_per_s: Mapped[float]
    utilization: Mapped[float]
    late: Mapped[float]


class ProfileCorrection(Base):
    """A profile's correction as of its last hourly run. `stated_tokens_per_s`: what the profile says; when it
    is made to say something else, the correction is dropped. `factor`: on that; `estimate`: tokens/s by what was
    observed, None: that does not tell. `moved_at`: when the factor was last changed; None: never. `prefill_factor`,
    `decode_factor`: on its step times, changed last `steps_moved_at`.
    """

    __tablename__ = "profile_corrections"
    __table_args__ = (
        CheckConstraint(
            "stated_tokens_per_s > 0 AND factor > 0 AND prefill_factor > 0 AND decode_factor > 0", name="positive"
        ),
        ForeignKeyConstraint(["model", "gpu_type"], ["profiles.model", "profiles.gpu_type"], ondelete="CASCADE"),
    )
    model: Mapped[str] = mapped_column(primary_key=True)
    gpu_type: Mapped[str] = mapped_column(primary_key=True)
    stated_tokens_per_s: Mapped[float]
    factor: Mapped[float]
    estimate: Mapped[float | None]
    windows: Mapped[int]
    reason: Mapped[str]
    moved_at: Mapped[datetime | None]
    prefill_factor: Mapped[float]
    decode_factor: Mapped[float]
    steps_reason: Mapped[str]
    steps_moved_at: Mapped[datetime | None]
    corrected_at: Mapped[datetime] = mapped_column(server_default=func.now())

    @property
    def tokens_per_s(self) -> float:
        """Theta, corrected."""
        return self.factor * self.stated_tokens_per_s


_ADD = text(
    """
    INSERT INTO load_windows AS present
        (model, region, gpu_type, start_s, observed_s, instances, tokens_per_s, utilization, late)
    SELECT * FROM unnest(CAST(:models AS text[]), CAST(:regions AS text[]), CAST(:gpu_types AS text[]),
                         CAST(:starts AS bigint[]), CAST(:minutes AS bigint[]), CAST(:instances AS bigint[]),
                         CAST(:rates AS float8[]), CAST(:utilizations AS float8[]), CAST(:late AS float8[]))
    ON CONFLICT (model, gpu_type, region, start_s) DO UPDATE SET
        observed_s = excluded.observed_s, instances = present.instances + excluded.instances,
        tokens_per_s = present.tokens_per_s + excluded.tokens_per_s,
        utilization = present.utilization + excluded.utilization, late = present.late + excluded.late
    WHERE present.observed_s < excluded.observed_s
    """
)
_NAMES = ("models", "regions", "gpu_types", "starts", "minutes", "instances", "rates", "utilizations", "late")


def observe_loads(session: Session, sums: Mapping[EndpointGpu, LoadSums], *, minute_s: int) -> None:
    """Add what was observed in the minute that starts at the Unix time `minute_s`; a second time it changes nothing."""
    start_s = minute_s // WINDOW_S * WINDOW_S
    rows = [
        (key.model, key.region, key.gpu_type, start_s, minute_s, *astuple(each)) for key, each in sorted(sums.items())
    ]
    if rows:
        session.execute(
            _ADD, {name: list(column) for name, column in zip(_NAMES, zip(*rows, strict=True), strict=True)}
        )


def read_windows(session: Session, *, since_s: int) -> Iterator[tuple[ModelGpu, list[LoadWindow]]]:
    """The windows of each model and GPU type that began at the Unix time `since_s` or later, of all regions."""
    row = LoadWindowRow
    rows = session.scalars(select(row).where(row.start_s >= since_s).order_by(row.model, row.gpu_type))
    for pair, windows in groupby(rows, key=lambda each: ModelGpu(model=each.model, gpu_type=each.gpu_type)):
        yield pair, [_sums(each).window(each.start_s) for each in windows]


def read_loads(session: Session, *, since_s: float) -> dict[EndpointGpu, ReportedLoad]:
    """What instances received since the Unix time `since_s`. Of a window that began before, the part since then counts.
    Each observation of an instance is of a minute.
    """
    table = LoadWindowRow
    loads: dict[EndpointGpu, ReportedLoad] = {}
    recent = table.start_s > since_s - WINDOW_S, table.observed_s > since_s - _MINUTE_S
    for row in session.scalars(select(table).where(*recent)):
        key = EndpointGpu(model=row.model, region=row.region, gpu_type=row.gpu_type)
        until_s, before = row.observed_s + _MINUTE_S, loads.get(key, ReportedLoad())
        part = (until_s - max(since_s, row.start_s)) / (until_s - row.start_s)
        loads[key] = ReportedLoad(
            rates=[*before.rates, row.tokens_per_s / row.instances],
            input_tokens=before.input_tokens + part * row.tokens_per_s * _MINUTE_S,
        )
    return loads


def _sums(row: LoadWindowRow) -> LoadSums:
    return LoadSums(instances=row.instances, tokens_per_s=row.tokens_per_s, utilization=row.utilization, late=row.late)


def forget_windows(session: Session, *, before_s: int, count_max: int) -> int:
    """Delete at most `count_max` windows from before the Unix time `before_s`; returns how many."""
    start_s = LoadWindowRow.start_s
    return delete_some(session, LoadWindowRow, start_s < before_s, order=start_s, count_max=count_max)


def corrections(session: Session) -> dict[ModelGpu, ProfileCorrection]:
    """All corrections in force."""
    return {ModelGpu(model=row.model, gpu_type=row.gpu_type): row for row in session.scalars(corrections_in_force())}


def corrections_in_force(model: str | None = None) -> Select[ProfileCorrection]:
    """The corrections of a model; None: of all."""
    query = select(ProfileCorrection)
    return query if model is None else query.where(ProfileCorrection.model == model)


def drop_correction(session: Session, model: str, gpu_type: str) -> None:
    """A profile states something else: its correction was of another statement. What was observed stays true."""
    table = ProfileCorrection
    session.execute(delete(table).where(table.model == model, table.gpu_type == gpu_type))


def put_correction(
    session: Session, pair: ModelGpu, correction: Correction, steps: StepCorrection, *, stated_tokens_per_s: float
) -> None:
    """Write what an hourly run decided, in place of the run before. `stated_tokens_per_s`: as the profile has it."""
    values = {
        "stated_tokens_per_s": stated_tokens_per_s,
        "factor": correction.factor,
        "estimate": correction.estimate,
        "windows": correction.windows,
        "reason": correction.reason,
        "moved_at": _at(correction.moved_s),
        "prefill_factor": steps.prefill_factor,
        "decode_factor": steps.decode_factor,
        "steps_reason": steps.reason,
        "steps_moved_at": _at(steps.moved_s),
        "corrected_at": func.now(),
    }
    key = {"model": pair.model, "gpu_type": pair.gpu_type}
    statement = insert(ProfileCorrection).values(**key, **values)
    session.execute(statement.on_conflict_do_update(index_elements=list(key), set_=values))


def _at(moved_s: float | None) -> datetime | None:
    return None if moved_s is None else datetime.fromtimestamp(moved_s, UTC)


def reset_correction(session: Session, pair: ModelGpu) -> ProfileCorrection:
    """Forget the correction of a profile and what was observed of it: it counts as stated until there is new evidence.

    Raises:
        NotFoundError: it has no correction.
    """
    row = require(session, ProfileCorrection, (pair.model, pair.gpu_type), param="profile correction")
    session.expunge(row)
    for table in (ProfileCorrection, LoadWindowRow):
        session.execute(delete(table).where(table.model == pair.model, table.gpu_type == pair.gpu_type))
    return row
