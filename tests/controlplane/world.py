"""A small fleet for tests: rows in Postgres, heartbeats in Redis, and nodes that answer as they are told to."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import uuid_utils
import uvicorn
from sqlalchemy import text, update
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from controlplane.dispatcher.steps import Step, Stepper
from controlplane.errors import TidepoolError
from controlplane.policies.lifecycle import BatchState, PlanState
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import NewRequest, add_batch, add_requests, move_batch
from controlplane.store.blobs.base import BlobStore
from controlplane.store.files import add_file, new_file_id
from controlplane.store.instances import add_instance, set_desired
from controlplane.store.joining import join_node
from controlplane.store.keys import make_key
from controlplane.store.plans import Plan, PlanEntry, add_plan, apply_plan
from controlplane.store.queue import Claim, batch_groups, claim
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Desired, Model, Node, Profile, Role
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.messages import (
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    InstanceReport,
    Pooled,
    Sampling,
    Started,
    StreamEvent,
    Task,
    Token,
    Tokenize,
    Tokenized,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
)
from dataplane.protocol.records import MEDIA_TYPE
from dataplane.protocol.tiers import Tier
from tests.controlplane.serving.scripted import encoded

KV_BYTES = 1 << 40
MODEL = "tide"
NODE_KEY = "node-key-for-tests"
PATIENCE_S = 120.0
"""How long anything may take on a machine that is busy with other things."""
HANGS_S = 600.0
FLOOD_TOKENS, FLOOD_CHARS = 20_000, 10_000
"""Much more than sockets hold."""


class FakeAgent:
    """A node's HTTP face. `script`: how to answer the next requests, then always `then`. "held" answers come when they
    are `freed`; those with `events` end when they are `ending`. `events`: what "answer" sends after `Started`, in place
    of three tokens. `pooled`: the values of a request that is not answered with text. `old`: it knows no records.
    `flooded`: tokens that "flood" has sent.
    """

    def __init__(self, *script: str, then: str = "answer", events: Sequence[StreamEvent] = ()) -> None:
        self.script = list(script)
        self.then = then
        self.events = events
        self.old = False
        self.flooded = 0
        self.pooled: Callable[[Generate], tuple[float, ...]] = lambda generate: (0.6, 0.8)
        self.asked: list[Generate] = []
        self.peers: set[int] = set()
        self.dropped, self.freed, self.ending = threading.Event(), threading.Event(), threading.Event()
        self.url = ""
        self.cached_tokens = 0
        self.questions: list[Any] = []
        self.app = Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
            ]
        )

    def next_mode(self) -> str:
        return self.script[0] if self.script else self.then

    async def _generate(self, request: Request) -> Response:
        assert request.headers["authorization"] == f"Bearer {NODE_KEY}"
        generate = msgspec.json.decode(await request.body(), type=Generate)
        self.asked.append(generate)
        assert request.client is not None
        self.peers.add(request.client.port)
        mode = self.next_mode()
        del self.script[:1]
        if mode in REFUSALS:
            failed = REFUSALS[mode]
            return Response(msgspec.json.encode(failed), status_code=failed.status)
        if mode == "bad bytes":
            return Response(b"\xff\xfe", status_code=500)
        if self.old:
            generate = msgspec.structs.replace(generate, text_frame=None)
        media_type = "application/x-ndjson" if generate.text_frame is None else MEDIA_TYPE
        return StreamingResponse(self._lines(mode, generate), media_type=media_type)

    async def _tokenize(self, request: Request) -> Response:
        """Three tokens, whatever the text."""
        return await self._answer(request, Tokenize, Tokenized(tokens=(1, 2, 3), context_tokens=99, spelled=("a",) * 3))

    async def _detokenize(self, request: Request) -> Response:
        return await self._answer(request, Detokenize, Detokenized(text="the tide"))

    async def _answer(self, request: Request, kind: Any, answer: msgspec.Struct) -> Response:
        assert request.headers["authorization"] == f"Bearer {NODE_KEY}"
        self.questions.append(msgspec.json.decode(await request.body(), type=kind))
        failed = REFUSALS.get(self.next_mode())
        del self.script[:1]
        status = 200 if failed is None else failed.status
        return Response(msgspec.json.encode(failed or answer), status_code=status)

    async def _lines(self, mode: str, generate: Generate) -> AsyncIterator[bytes]:
        try:
            if mode == "die":
                raise ConnectionError(mode)
            if mode == "hang":
                await asyncio.sleep(HANGS_S)
            if mode == "garbage":
                yield b"<html>no node here</html>\n"
            elif mode != "empty":
                async for event in self._events(mode, generate):
                    yield encoded(event, generate)
        except (asyncio.CancelledError, GeneratorExit):
            self.dropped.set()
            raise

    async def _events(self, mode: str, generate: Generate) -> AsyncIterator[StreamEvent]:
        yield Started(prompt_tokens=7)
        await asyncio.sleep(0.5 if mode == "slow" else 0)
        while mode == "held" and not self.freed.is_set():  # noqa: ASYNC110  (another thread sets it)
            await asyncio.sleep(0.01)
        if mode == "answer" and generate.pooling:
            yield Pooled(values=self.pooled(generate))
            yield Finished(finish_reason="stop", prompt_tokens=7, completion_tokens=0)
            return
        if (mode in {"answer", "held"} and self.events) or mode in ANSWERS:
            for event in ANSWERS.get(mode, self.events):
                while mode == "held" and isinstance(event, Finished) and not self.ending.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                yield event
            return
        while mode == "flood" and self.flooded < FLOOD_TOKENS:
            yield Token(text="x" * FLOOD_CHARS, token_ids=(1,))
            self.flooded += 1
            await asyncio.sleep(0)
        if not generate.generated:
            yield spoken("the\0tide " if mode == "nul" else "the tide ", (1, 2), generate)
        if mode == "die later":
            raise ConnectionError(mode)
        if mode == "hang later":
            await asyncio.sleep(HANGS_S)
        if mode == "fail later":
            yield Failed(status=503, code="worker_lost", message="the worker died", retryable=True)
        elif mode != "no finish":
            yield spoken("turns", (3,), generate)
            yield Finished(finish_reason="stop", prompt_tokens=7, completion_tokens=3, cached_tokens=self.cached_tokens)


ANSWERS: dict[str, tuple[StreamEvent, ...]] = {
    "tools": (
        Token(text="", token_ids=(1, 2), reasoning="it asks for weather"),
        Token(text="", token_ids=(3,), tool_calls=(ToolCallDelta(index=0, name="weather"),)),
        Token(text="", token_ids=(4,), tool_calls=(ToolCallDelta(index=0, arguments='{"city":'),)),
        Token(text="", token_ids=(5,), tool_calls=(ToolCallDelta(index=0, arguments='"Paris"}'),)),
        Token(text="", token_ids=(6, 7), tool_calls=(ToolCallDelta(index=1, name="time", arguments="{}"),)),
        Finished(finish_reason="tool_calls", prompt_tokens=7, completion_tokens=7, reasoning_tokens=2),
    )
}
"""Whole answers by mode: "tools" thinks, and calls two tools."""


def spoken(text: str, token_ids: tuple[int, ...], generate: Generate) -> Token:
    """The words of some tokens, with log probabilities where they are asked for: those of each seed are its own."""
    if generate.sampling.logprobs is None:
        return Token(text=text, token_ids=token_ids)
    words = [word + " " for word in text.split()]
    words[-1] = text[sum(map(len, words[:-1])) :]
    logprob = -0.5 - (generate.sampling.seed or 0) % 7
    top = tuple(_logprob(100 + rank, f"w{rank}", -1.0 - rank) for rank in range(generate.sampling.logprobs))
    logprobs = tuple(
        TokenLogprob(_logprob(token_id, word, logprob), top) for token_id, word in zip(token_ids, words, strict=True)
    )
    return Token(text=text, token_ids=token_ids, logprobs=logprobs)


def _logprob(token_id: int, text: str, logprob: float) -> TopLogprob:
    return TopLogprob(token_id, text, tuple(text.encode()), logprob)


REFUSALS = {
    "too long prompt": Failed(status=400, code="context_length_exceeded", message="too long", param="prompt"),
    "too long": Failed(status=400, code="context_length_exceeded", message="too long", param="max_tokens"),
    "not ready": Failed(status=409, code="instance_not_ready", message="not ready", retryable=True),
    "overloaded": Failed(status=429, code="overloaded", message="full", retryable=True),
    "wrong key": Failed(status=401, code="invalid_node_key", message="the node key is wrong"),
    "worker lost": Failed(status=503, code="worker_lost", message="the worker died", retryable=True),
    "made up": Failed(status=429, code="made up", message="made up", retryable=True),
    "odd status": Failed(status=200, code="odd", message="odd"),
}


@contextlib.contextmanager
def served(app: Any, **options: Any) -> Iterator[str]:
    """The app on a free port, served by a thread; its address. `options`: further ones of the server."""
    config = uvicorn.Config(
        app,
        port=0,
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=int(PATIENCE_S),
        **options,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive()


def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Wait for another thread or process."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What works return that start at the same moment, each in a thread of its own, or the codes of their errors."""
    start = threading.Barrier(len(works))

    def ending(work: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return work()
        except TidepoolError as error:
            return error.code

    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(ending, works))


def a_plan(
    index: int, cells: Sequence[tuple[str, str, int]] = ((MODEL, "us-east", 2),), **changes: Any
) -> tuple[Plan, list[PlanEntry]]:
    """A draft of the second hour ever, made at this index of the fleet: so many instances of a model in a region."""
    plan_id = f"plan_{uuid_utils.uuid7().hex}"
    values: dict[str, Any] = {
        "id": plan_id,
        "state": PlanState.DRAFT,
        "origin": "operator",
        "window_start_s": 3600,
        "fleet_index": index,
        "solver": "HiGHS",
        "status": "optimal",
        "solve_time_s": 0.1,
        "unserved": [],
        "reason": "",
        "created_by": "me",
    }
    entries = [
        PlanEntry(plan_id=plan_id, model=model, region=region, gpu_type="H800", before=0, after=after, reason="x")
        for model, region, after in cells
    ]
    return Plan(**(values | changes)), entries


class World:
    """Two regions, one GPU type, one model with a profile and an endpoint in both regions; nodes as tests need them."""

    def __init__(self, database: Database, live: LiveStore, settings: Settings) -> None:
        self.database, self.live, self.settings = database, live, settings
        with database.transaction() as session:
            for region in ("us-east", "us-west"):
                fleet.put_region(session, name=region, position=None)
            fleet.put_gpu_type(session, name="H800", memory_bytes=80 << 30, cost_per_hour=2.0)
        self.add_model(MODEL)

    def add_model(self, name: str, *, minimum: int = 0, maximum: int = 4, task: Task = "generate") -> None:
        model = Model(
            name=name,
            path="/x",
            architecture="Llama",
            weights_bytes=1,
            kv_bytes_per_token=512,
            context_tokens=4096,
            task=task,
        )
        with self.database.transaction() as session:
            fleet.put_model(session, model)
            fleet.put_profile(
                session, Profile(model=name, gpu_type="H800", tokens_per_s=1000.0, gpus=1, load_time_s=30.0)
            )
            for region in ("us-east", "us-west"):
                fleet.put_endpoint(session, model=name, region=region, minimum=minimum, maximum=maximum)

    def expect_no_loops(self) -> None:
        """Nobody runs the loops, and they are not missed either."""
        with self.database.transaction() as session:
            session.execute(text("UPDATE fleet SET created_at = now() + interval '1 day'"))

    def key(self, role: Role = Role.CLIENT, tenant: str = "acme", models: Sequence[str] | None = None) -> str:
        with self.database.transaction() as session:
            return make_key(session, name=f"{role}-{tenant}", role=role, tenant=tenant, models=models).secret

    def join(self, name: str, *, url: str = "http://127.0.0.1:9", region: str = "us-east", slots: int = 2) -> None:
        spec = tuple(SlotSpec(gpus=2, memory_bytes=160 << 30, hosts=1) for _ in range(slots))
        with self.database.transaction() as session:
            join_node(session, Join(node=name, region=region, gpu_type="H800", url=url, slots=spec, engine="replay"))
            fleet.touch_node(session, name)

    def place(self, node: str, *, desired: Desired = Desired.RUNNING, model: str = MODEL, slot: int = 0) -> str:
        """An instance on a node, not yet observed; its id."""
        with self.database.transaction() as session:
            row = session.get_one(Node, node)
            made = add_instance(session, model=model, region=row.region, gpu_type="H800", node=node, slot=slot, gpus=1)
            session.flush()
            if desired != Desired.RUNNING:
                set_desired(session, [made.id], desired)
            return made.id

    def serve(self, name: str, url: str, *, region: str = "us-east", used: float = 0.0, model: str = MODEL) -> str:
        """A node with one ready instance that reports `used` of its KV; the instance's id."""
        self.join(name, url=url, region=region)
        instance_id = self.place(name, model=model)
        self.report(name, instance_id, region=region, url=url, used=used, model=model)
        return instance_id

    def report(
        self,
        node: str,
        instance_id: str,
        *,
        region: str,
        url: str,
        used: float = 0.0,
        model: str = MODEL,
        rate: float | None = None,
        prefill_s: float | None = None,
        context_tokens: int | None = None,
    ) -> None:
        seen = InstanceReport(
            instance_id=instance_id,
            model=model,
            slot=0,
            state="ready",
            kv_used_bytes=int(used * KV_BYTES),
            kv_capacity_bytes=KV_BYTES,
            input_tokens_per_s=rate,
            prefill_s=prefill_s,
            context_tokens=context_tokens,
        )
        beat = Heartbeat(node=node, boot_id="b", generation=0, instances=(seen,))
        self.live.write_heartbeat(beat, region=region, gpu_type="H800", url=url)

    def in_force(self, cells: Sequence[tuple[str, str, int]], **changes: Any) -> str:
        """A plan of these counts by model and region, applied; its id."""
        with self.database.transaction() as session:
            plan, entries = a_plan(fleet.fleet_index(session), cells, **changes)
            plan_id, index = plan.id, plan.fleet_index
            assert add_plan(session, plan, entries)
            apply_plan(session, plan_id, index=index, now_s=0.0)
        return plan_id

    def add_batch(
        self,
        *,
        lines: int = 0,
        tenant: str = "acme",
        window_s: int = 3600,
        file_id: str | None = None,
        endpoint: str = "/v1/completions",
    ) -> str:
        """A batch: validating, or with `lines` requests already in the queue; its id."""
        with self.database.transaction() as session:
            kept = file_id or new_file_id()
            if file_id is None:
                add_file(
                    session,
                    file_id=kept,
                    tenant=tenant,
                    filename="in.jsonl",
                    purpose="batch",
                    size_bytes=1,
                    keep=timedelta(days=1),
                )
            batch = add_batch(
                session,
                tenant=tenant,
                input_file_id=kept,
                endpoint=endpoint,
                completion_window="1h",
                window_s=window_s,
                labels=None,
            )
            if lines:
                add_requests(session, batch, (request_line(n) for n in range(1, lines + 1)))
                move_batch(session, batch, BatchState.IN_PROGRESS)
            return batch.id

    def step(self, step: Step, blobs: BlobStore, **changes: Any) -> str | None:
        """What a new dispatcher does first: this step, with the next batch that is due."""
        return Stepper(step, self.database, blobs, self.settings.model_copy(update=changes)).one()

    def is_waiting_for_a_lock(self) -> bool:
        """Whether some statement waits. A transaction sees one snapshot of who waits, so each look has its own."""
        waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        with self.database.transaction() as session:
            return bool(session.scalar(text(waits)))

    def no_delay(self) -> None:
        """The next try of every batch may begin at once."""
        with self.database.transaction() as session:
            session.execute(update(Batch).values(not_before=None))

    def batch(self, batch_id: str) -> Batch:
        with self.database.transaction() as session:
            return session.get_one(Batch, batch_id)


def claim_waiting(session: Session, count: int = 10, *, lease_s: int = 60) -> list[Claim]:
    """Lease up to `count` requests of each batch and model."""
    return claim(session, {(group.batch, group.model): count for group in batch_groups(session)}, lease_s=lease_s)


def request_line(number: int, body: bytes | None = None) -> NewRequest:
    """A validated line. `body`: as stored; that of a prompt of six bytes, if not given."""
    sampling = Sampling(max_tokens=4)
    message = Generate(
        request_id="", instance_id="", model=MODEL, tier=Tier.NIW, prompt=f"line {number}", sampling=sampling
    )
    return NewRequest(
        line=number, custom_id=f"c{number}", model=MODEL, body=body or msgspec.json.encode(message), input_tokens=2
    )
