"""A primary is cut off, its standby promoted, and a gateway still works with the old one: it promises nothing, nodes
obey nobody of its term, and interactive requests go on.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest
from pydantic import SecretStr
from sqlalchemy import select, text

import migrations
from controlplane.planner.plan import hour_nearest
from controlplane.policies.lifecycle import PlanState
from controlplane.settings import Settings
from controlplane.store.batch_tables import Batch, File
from controlplane.store.fleet import fleet_index
from controlplane.store.keys import ApiKey, make_key
from controlplane.store.plans import Plan, add_plan
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Role
from dataplane.agent.heartbeats import join_message
from dataplane.agent.node import Agent
from dataplane.protocol.errors import StaleTermError
from dataplane.protocol.messages import DesiredInstances
from ops.local.supervisor import Supervisor
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import FakeAgent, World, a_plan, until
from tests.dataplane.replay_node import settings as agent_settings
from tests.servers import Servers, Standby


class Cluster:
    """A primary whose promised commits wait for its standby."""

    def __init__(self, folder: Path) -> None:
        self.servers = Servers(folder / "servers")
        migrations.upgrade(self.servers.postgres.url())
        self.standby = Standby(folder / "standby", self.servers.postgres)
        self.standby.prepare()
        self._running = ExitStack()
        self._running.enter_context(Supervisor([self.standby.child()]))
        self.settings = Settings(
            database_url=SecretStr(self.servers.postgres.url()),
            redis_url=SecretStr(self.servers.redis.url()),
            home=folder,
            database_timeout_s=2,
            node_keys_unbound=True,
        )
        self.database = Database(make_engine(self.settings))
        self.live = LiveStore(self.settings)
        self.world = World(self.database, self.live, self.settings)
        for statement in ("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'", "SELECT pg_reload_conf()"):
            with self.database.statement() as session:
                session.execute(text(statement))

    @property
    def promoted(self) -> Settings:
        return self.settings.model_copy(update={"database_url": SecretStr(self.standby.url())})

    def cut_off(self) -> None:
        """The standby hears no more of the primary, and becomes one; the other goes on, alone."""
        with self._at_standby() as standby, standby.statement() as session:
            assert session.execute(text("SELECT pg_promote()")).scalar_one()

    def promised(self, file_id: str) -> tuple[bool, bool, PlanState]:
        """What the regions of the promoted primary know: whether the key is revoked, a batch of the file is there, and
        how the plan is.
        """
        with self._at_standby() as standby, standby.transaction() as session:
            revoked = session.scalars(select(ApiKey.revoked_at).where(ApiKey.name == "leaked")).one()
            batches = session.scalars(select(Batch.id).where(Batch.input_file_id == file_id)).all()
            assert session.scalars(select(File.id)).all() == [file_id]
            return revoked is not None, bool(batches), session.scalars(select(Plan.state)).one()

    @contextmanager
    def _at_standby(self) -> Iterator[Database]:
        database = Database(make_engine(self.promoted))
        try:
            yield database
        finally:
            database.close()

    def close(self) -> None:
        self.live.close()
        self.database.close()
        self._running.close()
        self.servers.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


class Link:
    """What an agent says to a gateway and is told, without its loop."""

    def __init__(self, agent: Agent, node_key: str) -> None:
        self.agent = agent
        self._headers = {"Authorization": f"Bearer {node_key}"}

    def join(self, gateway: Gateway) -> None:
        content = msgspec.json.encode(join_message(self.agent, "http://127.0.0.1:9"))
        assert gateway.http.post("/node/join", content=content, headers=self._headers).status_code == 200

    def beat(self, gateway: Gateway) -> httpx.Response:
        content = msgspec.json.encode(self.agent.heartbeat())
        return gateway.http.post("/node/heartbeat", content=content, headers=self._headers)

    def follow(self, gateway: Gateway) -> DesiredInstances:
        answer = self.beat(gateway)
        assert answer.status_code == 200, answer.text
        desired = msgspec.json.decode(answer.content, type=DesiredInstances)
        self.agent.apply(desired)
        return desired


def agent_of(folder: Path) -> Agent:
    return Agent(agent_settings(node="n9", state_dir=folder / "n9"), "boot")


def test_a_cut_off_primary_promises_nothing_and_is_obeyed_by_nobody(cluster: Cluster, tmp_path: Path) -> None:
    admin, node_key = cluster.world.key(Role.ADMIN), cluster.world.key(Role.NODE)
    with cluster.database.transaction() as session:
        leaked = make_key(session, name="leaked", role=Role.CLIENT, tenant="acme").row.id
    with running_gateway(cluster.world, FakeAgent()) as old:
        file_id = old.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"{}\n")}).json()["id"]
        link = Link(agent_of(tmp_path), node_key)
        link.join(old)
        of_old = link.follow(old)
        assert (of_old.term, link.agent.term) == (1, 1)
        with cluster.database.transaction() as session:
            plan, entries = a_plan(fleet_index(session), window_start_s=hour_nearest(time.time()))
            plan_id, index = plan.id, plan.fleet_index
            assert add_plan(session, plan, entries)
        cluster.cut_off()

        new_world = copy.copy(cluster.world)
        new_world.settings = cluster.promoted
        with running_gateway(new_world, secret=old.secret) as new:
            assert link.follow(new).term == 2

        assert link.beat(old).status_code == 503
        with pytest.raises(StaleTermError):
            link.agent.apply(of_old)
        link.agent = agent_of(tmp_path)  # a restart of the agent makes it no more obedient
        refused = link.beat(old)
        assert refused.status_code == 503
        assert "in term 1 of its primary; node 'n9' has seen term 2" in refused.json()["detail"]
        with pytest.raises(StaleTermError):
            link.agent.apply(of_old)

        headers = {"Authorization": f"Bearer {admin}"}
        batch = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        for answer in (
            old.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b", b"{}\n")}),
            old.http.post("/v1/batches", json=batch),
            old.http.delete(f"/admin/keys/{leaked}", headers=headers),
            old.http.post(f"/admin/plans/{plan_id}/apply", json={"index": index}, headers=headers),
        ):
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
        assert cluster.promised(file_id) == (False, False, PlanState.DRAFT)

        assert "turns" in old.chat(200).text, "interactive requests of the region go on"
        until(lambda: old.http.get("/readyz").json()["reported_term"] == 2)
        verdict = old.http.get("/readyz")
        assert (verdict.status_code, verdict.json()["status"], verdict.json()["term"]) == (200, "degraded", 1)
