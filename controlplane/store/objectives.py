"""How the tiers' objectives were kept: answers and tokens by ten minutes, model, region and tier. Every gateway adds
what it counted. Where it cannot know whether a write succeeded, it adds the counts of those seconds again.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from sqlalchemy import ARRAY, CheckConstraint, ColumnElement, Index, String, any_, cast, func, select, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.store.rows import delete_some
from controlplane.store.tables import Base

BUCKET_S = 600
ALL_MODELS = ""
"""Under this name the counts of all models are kept once more: a day of a large fleet is read in milliseconds."""
_ROWS_MAX = 10_000


class ObjectiveCount(Base):
    """Answers, those of them that kept both objectives, tokens, those of them that came in time, and answers that
    failed.
    """

    __tablename__ = "objective_counts"
    __table_args__ = (
        CheckConstraint("mod(start_s, 600) = 0", name="bucket"),
        CheckConstraint("answers >= kept AND kept >= 0", name="answers_positive"),
        CheckConstraint("tokens >= tokens_in_time AND tokens_in_time >= 0", name="tokens_positive"),
        Index("ix_objective_counts_start_s", "start_s"),
    )
    model: Mapped[str] = mapped_column(primary_key=True)
    start_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    region: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    answers: Mapped[int]
    kept: Mapped[int]
    tokens: Mapped[int]
    tokens_in_time: Mapped[int]
    failed: Mapped[int] = mapped_column(server_default=text("0"))


class ObjectiveKey(NamedTuple):
    """What is counted by. `start_s`: the beginning of its ten minutes."""

    model: str
    start_s: int
    region: str
    tier: str


@dataclass
class Kept:
    """How objectives were kept: answers, those that kept both, tokens, those in time, and answers that failed."""

    answers: int = 0
    kept: int = 0
    tokens: int = 0
    tokens_in_time: int = 0
    failed: int = 0

    def add(self, other: "Kept") -> None:
        """Count some more."""
        self.answers += other.answers
        self.kept += other.kept
        self.tokens += other.tokens
        self.tokens_in_time += other.tokens_in_time
        self.failed += other.failed


_ADD = text(
    """
    INSERT INTO objective_counts AS present
        (model, start_s, region, tier, answers, kept, tokens, tokens_in_time, failed)
    SELECT * FROM unnest(CAST(:models AS text[]), CAST(:starts AS bigint[]), CAST(:regions AS text[]),
                         CAST(:tiers AS text[]), CAST(:answers AS bigint[]), CAST(:kept AS bigint[]),
                         CAST(:tokens AS bigint[]), CAST(:in_time AS bigint[]),
                         CAST(:failed AS bigint[]))
    ON CONFLICT (model, start_s, region, tier) DO UPDATE SET
        answers = present.answers + excluded.answers, kept = present.kept + excluded.kept,
        tokens = present.tokens + excluded.tokens, tokens_in_time = present.tokens_in_time + excluded.tokens_in_time,
        failed = present.failed + excluded.failed
    """
)
_NAMES = ("models", "starts", "regions", "tiers", "answers", "kept", "tokens", "in_time", "failed")


def add_objectives(session: Session, counts: Mapping[ObjectiveKey, Kept]) -> None:
    """Add what was counted of models, and to all models together. Rows are locked in one order by all gateways."""
    whole = dict(counts)
    for key, kept in counts.items():
        whole.setdefault(key._replace(model=ALL_MODELS), Kept()).add(kept)
    rows = [(*key, *astuple(kept)) for key, kept in sorted(whole.items())]
    for first in range(0, len(rows), _ROWS_MAX):
        columns = zip(*rows[first : first + _ROWS_MAX], strict=True)
        session.execute(_ADD, {name: list(column) for name, column in zip(_NAMES, columns, strict=True)})


def read_kept(session: Session, *, since_s: int, now_since_s: int) -> list[tuple[str, str, int, int, int, int]]:
    """Of all models since the Unix time `since_s`: region, tier, answers and those that kept the objectives; both again
    since `now_since_s`.
    """
    count = ObjectiveCount
    recent = count.start_s >= now_since_s
    rows = session.execute(
        select(
            count.region,
            count.tier,
            func.sum(count.answers),
            func.sum(count.kept),
            func.coalesce(func.sum(count.answers).filter(recent), 0),
            func.coalesce(func.sum(count.kept).filter(recent), 0),
        )
        .where(count.model == ALL_MODELS, count.start_s >= since_s)
        .group_by(count.region, count.tier)
        .order_by(count.region, count.tier)
    )
    return [
        (region, tier, int(day), int(kept), int(now), int(kept_now)) for region, tier, day, kept, now, kept_now in rows
    ]


def read_objectives(
    session: Session, *, model: str | None, region: str | None, since_s: int
) -> list[tuple[int, str, Kept]]:
    """The counts of a model (None: of all) in a region (None: in all) by ten minutes and tier, the oldest first."""
    count = ObjectiveCount
    query = select(count.start_s, count.tier, *_sums()).where(count.model == (model or ALL_MODELS))
    if region is not None:
        query = query.where(count.region == region)
    rows = session.execute(
        query.where(count.start_s >= since_s).group_by(count.start_s, count.tier).order_by(count.start_s, count.tier)
    )
    return [(start_s, tier, _kept(sums)) for start_s, tier, *sums in rows]


def read_endpoints_kept(
    session: Session, models: Collection[str], regions: Collection[str], *, since_s: int
) -> dict[tuple[str, str], Kept]:
    """By (model, region), of those that had answers: their counts in all tiers since the Unix time `since_s`."""
    count = ObjectiveCount
    rows = session.execute(
        select(count.model, count.region, *_sums())
        .where(
            count.model == any_(cast(list(models), ARRAY(String))),
            count.region == any_(cast(list(regions), ARRAY(String))),
            count.start_s >= since_s,
        )
        .group_by(count.model, count.region)
    )
    return {(model, region): _kept(sums) for model, region, *sums in rows}


def read_models_kept(session: Session, models: Collection[str], *, since_s: int) -> dict[str, Kept]:
    """The counts of some models over all regions and tiers since the Unix time `since_s`."""
    count = ObjectiveCount
    rows = session.execute(
        select(count.model, *_sums()).where(count.model.in_(models), count.start_s >= since_s).group_by(count.model)
    )
    counted = {model: _kept(sums) for model, *sums in rows}
    return {model: counted.get(model, Kept()) for model in models}


def forget_objectives(session: Session, *, before_s: int, count_max: int) -> int:
    """Delete at most `count_max` counts from before the Unix time `before_s`; returns how many."""
    start_s = ObjectiveCount.start_s
    return delete_some(session, ObjectiveCount, start_s < before_s, order=start_s, count_max=count_max)


def _sums() -> list[ColumnElement[Any]]:
    """In the order of `Kept`."""
    count = ObjectiveCount
    return [
        func.sum(column) for column in (count.answers, count.kept, count.tokens, count.tokens_in_time, count.failed)
    ]


def _kept(sums: Iterable[Any]) -> Kept:
    return Kept(*map(int, sums))
