"""Two dispatchers and their nodes die between any two statements of claim, send, write and finalize, before a commit
or just after it; leases run out, late answers come, batches are cancelled. At the end each line has exactly one result,
and nothing is leased.

The steps are the dispatcher's own, on real Postgres. A dispatcher lives until its engine's budget of statements and
commits is used up; from then on every call of it fails, as if its process were gone, and a new one takes its place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from controlplane.dispatcher.finalize import FINALIZE
from controlplane.dispatcher.ingest import VALIDATE
from controlplane.dispatcher.steps import Step, Stepper
from controlplane.errors import ConflictError
from controlplane.store import queue
from controlplane.store.batches import cancel_batch
from controlplane.store.blobs.base import BlobStore
from controlplane.store.queue import Claim, Outcome
from controlplane.store.session import Database, make_engine
from dataplane.agent.fences import Fences
from dataplane.dispatch.requests import InflightRequest
from dataplane.engines.interface import EngineRequest
from dataplane.protocol.errors import StaleEpochError
from tests.controlplane.world import World, claim_waiting

LINES = 4
ATTEMPTS_MAX = 3
NEVER = 10_000
COUNTED = "SELECT coalesce(sum(completed), 0), coalesce(sum(failed), 0) FROM batch_counts"
RESULTS = "SELECT count(*) FILTER (WHERE state = 'completed'), count(nullif(state, 'completed')) FROM batch_results"
Death = tuple[int, bool] | None
"""After so many statements and commits; and whether a commit takes effect first."""


class Killed(BaseException):
    """A process ends here. No `except Exception` may go on after it."""


class Dispatcher:
    """The database side of one dispatcher, which dies at a point given beforehand."""

    def __init__(self, world: World) -> None:
        self.database = Database(make_engine(world.settings))
        self.left = NEVER
        self.after_commit = False
        event.listen(self.database.engine, "before_cursor_execute", self._statement)
        event.listen(self.database.engine, "commit", self._commit)

    def _statement(self, *_: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def _commit(self, connection: Any) -> None:
        self.left -= 1
        if self.left == -1 and self.after_commit:
            connection.connection.dbapi_connection.commit()  # it took effect, and nobody here hears of it
        if self.left < 0:
            raise Killed

    @contextmanager
    def session(self, *, alone: bool) -> Iterator[Session]:
        with self.database.statement() if alone else self.database.transaction() as session:
            yield session


class Node:
    """What a node keeps of requests: the newest claim of each alone runs."""

    def __init__(self) -> None:
        self.fences = Fences(keys_max=100)
        self.running: dict[str, tuple[int, InflightRequest]] = {}

    def start(self, claim: Claim) -> bool:
        request = EngineRequest(
            request_id=f"{claim.fence}@{claim.epoch}", instance_id="i", tier="NIW", prompt=(1,), max_tokens=1
        )
        flight = InflightRequest(request=request, model="m", arrived_s=0.0)
        try:
            self.fences.enter(claim.fence, claim.epoch)
            self.fences.run(claim.fence, claim.epoch, flight, self._cancel)
        except StaleEpochError:
            return False
        assert claim.fence not in self.running, "two runs of one request on one node"
        self.running[claim.fence] = claim.epoch, flight
        return True

    def _cancel(self, flight: InflightRequest) -> None:
        del self.running[flight.request_id.partition("@")[0]]


class CrashPoints(RuleBasedStateMachine):
    """One batch, two dispatchers, one node that is asked by both."""

    world: World
    blobs: BlobStore
    deaths = 0
    held = Bundle("held")
    who = st.integers(0, 1)
    death = st.none() | st.tuples(st.integers(0, 8), st.booleans())

    @initialize()
    def submit(self) -> None:
        self.batch_id = self.world.add_batch()
        self.node = Node()
        self.dispatchers = [Dispatcher(self.world), Dispatcher(self.world)]
        with self.blobs.writing(self.world.batch(self.batch_id).input_file_id) as stream:
            for number in range(LINES):
                line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
                stream.write(msgspec.json.encode({**line, "body": {"model": "tide", "prompt": "x"}}) + b"\n")

    def _do(self, who: int, step: Callable[[Session], Any], death: Death = None, *, alone: bool = False) -> Any:
        """One transaction of a dispatcher, or (`alone`) statements that each are one."""

        def work(dispatcher: Dispatcher) -> Any:
            with dispatcher.session(alone=alone) as session:
                return step(session)

        return self._live(who, work, death)

    def _step(self, who: int, step: Step, death: Death) -> None:
        """The next batch a step further; a dispatcher that died over it does not count as the batch's fault."""
        self.world.no_delay()
        settings = self.world.settings.model_copy(update={"batch_attempts_max": NEVER})
        self._live(who, lambda dispatcher: Stepper(step, dispatcher.database, self.blobs, settings).one(), death)

    def _live(self, who: int, work: Callable[[Dispatcher], Any], death: Death) -> Any:
        """Something that a dispatcher does; None if it died over it. Then another one starts in its place."""
        dispatcher = self.dispatchers[who]
        dispatcher.left, dispatcher.after_commit = death or (NEVER, False)
        try:
            return work(dispatcher)
        except Killed:
            type(self).deaths += 1
            dispatcher.database.engine.dispose()
            self.dispatchers[who] = Dispatcher(self.world)
            return None

    @rule(who=who, death=death)
    def ingest(self, who: int, death: Death = None) -> None:
        self._step(who, VALIDATE, death)

    @rule(target=held, who=who, count=st.integers(1, LINES), death=death)
    def claim_and_send(self, who: int, count: int, death: Death = None) -> tuple[int, list[Claim]]:
        def step(session: Session) -> list[Claim]:
            return claim_waiting(session, count, lease_s=600)

        claims = self._do(who, step, death, alone=True) or []
        for claim in claims:
            self.node.start(claim)
        return who, claims

    @rule(held=held)
    def send_again(self, held: tuple[int, list[Claim]]) -> None:
        """A dispatcher that was paused wakes up. The node keeps to the newest claim."""
        for claim in held[1]:
            before, _ = self.node.running.get(claim.fence, (0, None))
            assert self.node.start(claim) or before > 0 or claim.fence not in self.node.running
            assert self.node.running[claim.fence][0] >= max(before, claim.epoch)

    @rule()
    def lose_the_node(self) -> None:
        self.node = Node()

    @rule(held=held, death=death, good=st.booleans())
    def write(self, held: tuple[int, list[Claim]], death: Death = None, *, good: bool) -> None:
        """Results come, maybe late and maybe a second time."""
        who, claims = held
        outcomes = [
            Outcome(claim=claim, status_code=200 if good else 400, body={"epoch": claim.epoch}) for claim in claims
        ]
        if outcomes:
            self._do(who, lambda session: self._finish(session, outcomes), death, alone=True)

    @staticmethod
    def _finish(session: Session, outcomes: list[Outcome]) -> None:
        rows = session.execute(
            text("SELECT batch_number, line, epoch FROM queued_requests WHERE lease_until IS NOT NULL")
        )
        newest = {(number, line): epoch for number, line, epoch in rows}
        written = queue.finish(session, outcomes)
        assert written == {each.claim.key: newest.get(each.claim.key) == each.claim.epoch for each in outcomes}

    @rule(held=consumes(held), death=death, tried=st.booleans())
    def give_back(self, held: tuple[int, list[Claim]], death: Death, *, tried: bool) -> None:
        who, claims = held
        for claim in claims:
            self._do(who, lambda s, c=claim: queue.give_back(s, c, delay_s=0, error="node lost", tried=tried), death)

    @rule(held=held, death=death)
    def renew(self, held: tuple[int, list[Claim]], death: Death) -> None:
        who, claims = held
        if claims:
            self._do(who, lambda session: queue.renew(session, claims, lease_s=600), death)

    @rule(who=who, death=death)
    def leases_run_out(self, who: int, death: Death = None) -> None:
        with self.world.database.transaction() as session:
            session.execute(
                text("UPDATE queued_requests SET lease_until = now() - interval '1 s' WHERE lease_until > now()")
            )
        self._do(who, lambda session: queue.expire_leases(session, attempts_max=ATTEMPTS_MAX, count_max=1000), death)
        self._no_delay()

    @rule(who=who, death=death)
    def finalize(self, who: int, death: Death = None) -> None:
        self._step(who, FINALIZE, death)

    @rule(who=who, death=death)
    def cancel(self, who: int, death: Death = None) -> None:
        with suppress(ConflictError):
            self._do(who, lambda session: cancel_batch(session, self.batch_id, tenant="acme"), death)

    def _no_delay(self) -> None:
        with self.world.database.transaction() as session:
            session.execute(text("UPDATE queued_requests SET not_before = NULL"))

    @invariant()
    def an_accepted_request_is_open_or_ended_never_both_or_neither(self) -> None:
        with self.world.database.transaction() as session:
            asked, open_, ended, both = session.execute(
                text(
                    "SELECT (SELECT count(*) FROM batch_requests), (SELECT count(*) FROM queued_requests),"
                    " (SELECT count(*) FROM batch_results),"
                    " (SELECT count(*) FROM queued_requests JOIN batch_results USING (batch_number, line))"
                )
            ).one()
        assert both == 0
        assert open_ + ended == asked
        assert asked in {0, LINES}
        with self.world.database.transaction() as session:
            assert session.execute(text(COUNTED)).one() == session.execute(text(RESULTS)).one(), "counts are kept"

    def teardown(self) -> None:
        """Everyone has died; a healthy dispatcher sees it through."""
        if not hasattr(self, "batch_id"):
            return
        self.dispatchers += [Dispatcher(self.world)]
        for _ in range(20):
            if self.world.batch(self.batch_id).ended_at is not None:
                break
            self.ingest(2)
            self.leases_run_out(2)
            self.write(self.claim_and_send(2, LINES), good=True)
            self.finalize(2)
        self._check_files()
        for dispatcher in self.dispatchers:
            dispatcher.database.close()
        with self.world.database.transaction() as session:
            for table in ("queued_requests", "batch_requests", "batch_results", "batch_counts"):
                assert session.execute(text(f"SELECT count(*) FROM {table}")).scalar_one() == 0, table

    def _check_files(self) -> None:
        batch = self.world.batch(self.batch_id)
        assert batch.state in {"completed", "cancelled"}
        lines = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                with self.blobs.open(file_id) as stream:
                    lines += [msgspec.json.decode(line)["custom_id"] for line in stream]
        if batch.total:
            assert sorted(lines) == [f"c{number}" for number in range(LINES)], "exactly one result a line"
            assert batch.completed + batch.failed == LINES
        else:
            assert (batch.state, lines) == ("cancelled", []), "it was cancelled before it was validated"


@pytest.mark.slow
def test_whatever_dies_each_line_has_one_result(world: World, blobs: BlobStore) -> None:
    class OnThisWorld(CrashPoints):
        pass

    OnThisWorld.world, OnThisWorld.blobs = world, blobs
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        OnThisWorld,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert OnThisWorld.deaths > 20, "else it shows nothing"
