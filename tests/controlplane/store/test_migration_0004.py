"""Pooled instances do not outlive the schema that knows them, and their nodes are told."""

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text

from tests.controlplane.planner.pool_fleet import add_models, join
from tests.controlplane.world import World

PLACED = (
    "INSERT INTO instances (id, model, region, gpu_type, node, slot, gpus, pooled, desired, observed)"
    " VALUES (:id, 'a', 'us-east', 'H800', :node, 0, :gpus, :pooled, 'running', 'ready')"
)


def test_what_is_pooled_is_given_up(world: World, engine: Engine, config: Config) -> None:
    add_models(world, "a")
    for node in ("n1", "n2"):
        join(world, node)
    with engine.begin() as connection:
        connection.execute(text(PLACED), {"id": "shared", "node": "n1", "gpus": 0, "pooled": True})
        connection.execute(text(PLACED), {"id": "alone", "node": "n2", "gpus": 1, "pooled": False})
    world.database.close()
    command.downgrade(config, "0003")
    with engine.begin() as connection:
        assert connection.execute(text("SELECT id FROM instances")).scalars().all() == ["alone"]
        generations = connection.execute(text("SELECT name, generation FROM nodes ORDER BY name")).all()
        assert [tuple(row) for row in generations] == [("n1", 1), ("n2", 0)]
    command.upgrade(config, "head")
    with engine.begin() as connection:
        row = connection.execute(text("SELECT pooled, gpus FROM instances")).one()
        assert tuple(row) == (False, 1)
        assert connection.execute(text("SELECT host_bytes FROM nodes")).scalars().all() == [None, None]
