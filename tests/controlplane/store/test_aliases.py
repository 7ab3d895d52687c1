"""Aliases: their models, and what they keep from being hidden or deleted."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, InUseError, InvalidValueError, NotFoundError
from controlplane.store import fleet, removal
from controlplane.store.aliases import delete_alias, list_aliases, put_alias
from controlplane.store.tables import Model
from tests.controlplane.world import World, until


def add_model(session: Session, name: str, *, task: str = "generate") -> None:
    fleet.put_model(
        session,
        Model(
            name=name,
            path=f"/models/{name}",
            architecture="LlamaForCausalLM",
            weights_bytes=1000,
            kv_bytes_per_token=8,
            context_tokens=4096,
            task=task,
        ),
    )


def put(world: World, name: str, weights: Mapping[str, int]) -> None:
    with world.database.transaction() as session:
        put_alias(session, name, weights)


def stored(world: World) -> dict[str, dict[str, int]]:
    with world.database.transaction() as session:
        return fleet.all_aliases(session)


@pytest.fixture
def two_models(world: World) -> World:
    with world.database.transaction() as session:
        add_model(session, "tide-2")
        add_model(session, "embedder", task="embed")
    return world


def test_an_alias_has_the_models_that_it_was_given_last(two_models: World) -> None:
    put(two_models, "chat", {"tide": 1})
    put(two_models, "chat", {"tide": 95, "tide-2": 5})
    put(two_models, "apart", {"tide-2": 1})
    assert stored(two_models) == {"chat": {"tide": 95, "tide-2": 5}, "apart": {"tide-2": 1}}
    put(two_models, "chat", {"tide-2": 3})
    assert stored(two_models)["chat"] == {"tide-2": 3}
    with two_models.database.transaction() as session:
        assert fleet.load_catalog(session).aliases == stored(two_models)
        assert [row.name for row in list_aliases(session, after=None, limit=1).rows] == ["apart"]
        delete_alias(session, "chat")
    assert stored(two_models) == {"apart": {"tide-2": 1}}
    with pytest.raises(NotFoundError), two_models.database.transaction() as session:
        delete_alias(session, "chat")


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        ({"nobody": 1}, NotFoundError, "'nobody' is not registered"),
        ({"tide": 0, "tide-2": 0}, InvalidValueError, "above 0"),
        ({"tide": 1, "embedder": 1}, InvalidValueError, "embed and generate"),
    ],
)
def test_what_no_alias_may_be(two_models: World, weights: dict[str, int], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        put(two_models, "chat", weights)
    assert stored(two_models) == {}


def test_no_model_is_hidden_by_mistake(two_models: World) -> None:
    with pytest.raises(ConflictError, match="'tide-2' is a model, which nobody could ask for"):
        put(two_models, "tide-2", {"tide": 1})
    put(two_models, "tide-2", {"tide": 1, "tide-2": 0})
    put(two_models, "chat", {"tide": 1})
    with pytest.raises(ConflictError, match="'chat' is an alias"), two_models.database.transaction() as session:
        add_model(session, "chat")
    with two_models.database.transaction() as session:
        add_model(session, "tide-2")  # it is there already


def test_a_model_of_an_alias_is_in_use(two_models: World) -> None:
    put(two_models, "chat", {"tide": 1, "tide-2": 0})
    with pytest.raises(InUseError, match="alias"), two_models.database.transaction() as session:
        removal.delete_model(session, "tide-2")
    with pytest.raises(IntegrityError), two_models.database.transaction() as session:
        session.execute(text("DELETE FROM models WHERE name = 'tide-2'"))
    put(two_models, "chat", {"tide": 1})
    with two_models.database.transaction() as session:
        removal.delete_model(session, "tide-2")


def test_a_new_alias_and_a_new_model_of_one_name_see_each_other(world: World) -> None:
    def register(name: str) -> None:
        with world.database.transaction() as session:
            add_model(session, name)

    with ThreadPoolExecutor(1) as threads:
        with world.database.transaction() as session:
            add_model(session, "chat")
            making = threads.submit(put, world, "chat", {"tide": 1})
            until(world.is_waiting_for_a_lock)
        with pytest.raises(ConflictError, match="'chat' is a model"):
            making.result()
        with world.database.transaction() as session:
            put_alias(session, "talk", {"tide": 1})
            registering = threads.submit(register, "talk")
            until(world.is_waiting_for_a_lock)
        with pytest.raises(ConflictError, match="'talk' is an alias"):
            registering.result()


def test_who_makes_or_deletes_one_alias_second_finds_what_the_first_did(world: World) -> None:
    def drop() -> None:
        with world.database.transaction() as session:
            delete_alias(session, "chat")

    with ThreadPoolExecutor(1) as threads:
        with world.database.transaction() as session:
            put_alias(session, "chat", {"tide": 1})
            making = threads.submit(put, world, "chat", {"tide": 2})
            until(world.is_waiting_for_a_lock)
        making.result()
        assert stored(world) == {"chat": {"tide": 2}}
        with world.database.transaction() as session:
            delete_alias(session, "chat")
            dropping = threads.submit(drop)
            until(world.is_waiting_for_a_lock)
        with pytest.raises(NotFoundError):
            dropping.result()
