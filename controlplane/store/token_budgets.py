"""What is reserved of tenants' budgets of tokens, by period. A gateway reserves a block in one transaction, in which a
constraint holds that no more is reserved than there is, and returns what it did not use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import CheckConstraint, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.policies.token_budgets import Budget, Reserved, choose_block
from controlplane.settings import Settings
from controlplane.store.rows import delete_some
from controlplane.store.tables import Base
from controlplane.store.tenants import Tenant, limits_of

_EVER = datetime(1970, 1, 1, tzinfo=UTC)
_MONTH = timedelta(days=31)


class TokenBudgetRow(Base):
    """What is reserved of a budget in a period, of at most `most`: the largest budget that the tenant had in it."""

    __tablename__ = "token_budgets"
    __table_args__ = (CheckConstraint("0 <= reserved AND reserved <= most", name="reserved"),)
    tenant: Mapped[str] = mapped_column(primary_key=True)
    budget: Mapped[str] = mapped_column(primary_key=True)
    starts_at: Mapped[datetime] = mapped_column(primary_key=True)
    reserved: Mapped[int]
    most: Mapped[int]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Reserved tokens. `starts`: of the periods whose budgets they are of; `good_for_s`: until the first period ends;
    None: it has no end. `refused`: the budget that has too few left.
    """

    tokens: int
    starts: Mapping[Budget, datetime]
    good_for_s: float | None
    refused: Budget | None = None


def period_of(budget: Budget, now: datetime) -> tuple[datetime, datetime | None]:
    """The beginning and the end of a budget's period; in UTC."""
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if budget is Budget.DAY:
        return day, day + timedelta(days=1)
    if budget is Budget.MONTH:
        return day.replace(day=1), (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    return _EVER, None


def reserve_block(session: Session, tenant: str, need: int, settings: Settings) -> Block:
    """Reserve a block of at least `need` tokens of all budgets that a tenant has."""
    now = session.execute(select(func.clock_timestamp())).scalar_one()
    budgets = limits_of(session.get(Tenant, tenant), settings).budgets()
    if not budgets:
        return Block(tokens=need, starts={}, good_for_s=0.0)
    periods = {budget: period_of(budget, now) for budget in budgets}
    rows = {budget: _locked(session, tenant, budget, periods[budget][0], budgets[budget]) for budget in sorted(budgets)}
    reserved = {budget: Reserved(tokens=budgets[budget], reserved=row.reserved) for budget, row in rows.items()}
    choice = choose_block(reserved, need)
    for row in rows.values():
        row.reserved += choice.tokens
    concerned = periods if choice.refused is None else {choice.refused: periods[choice.refused]}
    ends = [end for _, end in concerned.values() if end is not None]
    return Block(
        tokens=choice.tokens,
        starts={budget: start for budget, (start, _) in periods.items()},
        good_for_s=(min(ends) - now).total_seconds() if ends else None,
        refused=choice.refused,
    )


def _locked(session: Session, tenant: str, budget: Budget, starts_at: datetime, most: int) -> TokenBudgetRow:
    row = insert(TokenBudgetRow).values(tenant=tenant, budget=budget.value, starts_at=starts_at, reserved=0, most=most)
    grown = func.greatest(TokenBudgetRow.most, row.excluded.most)
    put = row.on_conflict_do_update(constraint="pk_token_budgets", set_={"most": grown}).returning(TokenBudgetRow)
    return session.execute(put, execution_options={"populate_existing": True}).scalar_one()


def return_block(session: Session, tenant: str, starts: Mapping[Budget, datetime], tokens: int) -> None:
    """Give back tokens that were reserved in these periods."""
    for budget in sorted(starts):
        session.execute(
            update(TokenBudgetRow)
            .where(
                TokenBudgetRow.tenant == tenant,
                TokenBudgetRow.budget == budget.value,
                TokenBudgetRow.starts_at == starts[budget],
            )
            .values(reserved=TokenBudgetRow.reserved - tokens)
        )


def reserved_now(session: Session, tenant: str, now: datetime) -> dict[Budget, int]:
    """What is reserved of a tenant's budgets in their present periods."""
    rows = session.scalars(select(TokenBudgetRow).where(TokenBudgetRow.tenant == tenant))
    present = {budget: period_of(budget, now)[0] for budget in Budget}
    return {Budget(row.budget): row.reserved for row in rows if present[Budget(row.budget)] == row.starts_at}


def forget_budgets(session: Session, *, keep_s: float, count_max: int) -> int:
    """Delete what was reserved in periods that began so long ago, and ended; a budget for ever has no end."""
    old = (TokenBudgetRow.starts_at > _EVER, TokenBudgetRow.starts_at < func.now() - timedelta(seconds=keep_s) - _MONTH)
    return delete_some(session, TokenBudgetRow, *old, order=TokenBudgetRow.starts_at, count_max=count_max)
