"""Aliases: names that clients ask for, and the models that answer, each by its weight."""

from collections.abc import Mapping

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, InvalidValueError
from controlplane.store.alias_tables import Alias, AliasTarget, Rollout
from controlplane.store.fleet import check_new_name, fleet_index
from controlplane.store.rows import Page, page, require
from controlplane.store.tables import Model


def weights_of(session: Session, alias: str) -> dict[str, int]:
    """The weights of an alias's models."""
    rows = select(AliasTarget.model, AliasTarget.weight).where(AliasTarget.alias == alias)
    return dict(session.execute(rows.order_by(AliasTarget.model)).all())


def put_alias(session: Session, name: str, weights: Mapping[str, int]) -> Alias:
    """Make an alias, or give it other models or weights.

    Raises:
        NotFoundError: a model is not registered.
        InvalidValueError: no weight is above zero, the models answer with different things, or no new alias may have
            the name.
        ConflictError: a new alias would hide a model of its name that is none of its own, or a roll-out moves its
            weights.
    """
    fleet_index(session, lock=True)  # a new alias and a new model of one name see each other
    alias = session.get(Alias, name, with_for_update=True)
    if alias is None:
        alias = _new_alias(session, name, weights)
    elif (rollout := live_rollout_of(session, name)) is not None:
        raise ConflictError(f"roll-out '{rollout}' moves the weights of '{name}': wait for its end, or roll it back")
    set_weights(session, name, weights)
    return alias


def set_weights(session: Session, alias: str, weights: Mapping[str, int]) -> None:
    """Give an alias, which the caller has locked, these models and weights.

    Raises:
        NotFoundError, InvalidValueError: as `put_alias`.
    """
    tasks = {require(session, Model, model, param="targets").task for model in weights}
    if len(tasks) > 1:
        raise InvalidValueError(f"targets: the models answer with {' and '.join(sorted(tasks))}", param="targets")
    if not any(weights.values()):
        raise InvalidValueError("targets: one weight at least must be above 0", param="targets")
    gone = delete(AliasTarget).where(AliasTarget.alias == alias, AliasTarget.model.not_in(list(weights)))
    session.execute(gone)
    for model, weight in weights.items():
        session.merge(AliasTarget(alias=alias, model=model, weight=weight))
    session.flush()


def delete_alias(session: Session, name: str) -> Alias:
    """Delete an alias. A model of its name is asked for by that name again.

    Raises:
        NotFoundError: there is none of the name.
        ConflictError: a roll-out moves its weights.
    """
    fleet_index(session, lock=True)
    alias = require(session, Alias, name, param="alias")
    session.refresh(alias, with_for_update=True)
    if (rollout := live_rollout_of(session, name)) is not None:
        raise ConflictError(f"roll-out '{rollout}' moves the weights of '{name}': roll it back first")
    session.delete(alias)
    session.flush()
    return alias


def list_aliases(session: Session, *, after: str | None, limit: int) -> Page[Alias]:
    """One page of aliases by name."""
    return page(session, select(Alias), after=after, limit=limit)


def live_rollout_of(session: Session, alias: str) -> str | None:
    """The roll-out that has not ended under an alias."""
    return session.scalar(select(Rollout.id).where(Rollout.alias == alias, Rollout.ended_at.is_(None)))


def _new_alias(session: Session, name: str, weights: Mapping[str, int]) -> Alias:
    check_new_name(name)
    if session.get(Model, name) is not None and name not in weights:
        raise ConflictError(
            f"'{name}' is a model, which nobody could ask for any more: name it among the targets, with weight 0 if it"
            " shall get no request",
            param="targets",
        )
    alias = Alias(name=name)
    session.add(alias)
    session.flush()
    return alias
