"""Answers as their readers get them: written or sent, as lines or as records, to who reads and to who does not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import httpx2 as httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from dataplane.agent.answer_streams import LINES_MEDIA_TYPE, AnswerStream, encoder, parts
from dataplane.agent.answers import Answer, answer_text
from dataplane.agent.http import make_app
from dataplane.agent.measures import RequestMeasure, RequestMeasures
from dataplane.agent.parsing.families import families_of
from dataplane.dispatch.requests import InflightRequest
from dataplane.engines.interface import EngineOutput, EngineRequest, TokenScore
from dataplane.protocol.errors import WorkerLostError
from dataplane.protocol.messages import (
    ChatMessage,
    Failed,
    Finished,
    Generate,
    Sampling,
    Started,
    StreamEvent,
    Token,
    decode_lines,
)
from dataplane.protocol.records import MEDIA_TYPE, RecordReader, TextRecord
from tests.dataplane.agent.parsing.test_answer_text import SpecialBytes
from tests.dataplane.replay_node import Node, generate, instance, model, running_node, settings, workers
from tests.dataplane.streams import token_ids
from tests.event_loop import asynchronous, until

FRAME = ('data: {"text":', "}\n\n")


class Body:
    """A body of which a test says how much is unread."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.full = self.lost = False
        self.on_room: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> None:
        assert data, "an empty chunk would end the body"
        self.written.append(data)


class Asked:
    """One request, whose outputs a test makes."""

    def __init__(self, *, accept: str = MEDIA_TYPE, thinks: bool = False, **changes: object) -> None:
        self.generate = generate(**{"text_frame": FRAME, **changes})
        request = EngineRequest(request_id="r", instance_id="i", tier="IW-N", prompt=(1, 2), max_tokens=99)
        self.inflight = InflightRequest(request=request, model="tide", arrived_s=0.0)
        self.cancelled: list[str] = []
        self.registry = CollectorRegistry()
        families = families_of(model(reasoning_parser="deepseek_r1" if thinks else None), None)
        self.text = answer_text(self.generate, SpecialBytes(), families, "")
        self.answer = Answer(
            self.inflight,
            self.text,
            cancel=lambda request: self.cancelled.append(request.request_id),
            measure=RequestMeasure(RequestMeasures(self.registry), "tide", 2, lambda: 0.0),
        )
        self.media_type, self.encode = encoder(self.generate, accept)
        self.body = Body()

    def put(self, *tokens: int, **changes: object) -> None:
        self.inflight.outputs.put(EngineOutput(request_id="r", token_ids=tokens, **changes))  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """The stream runs inside, and has ended behind."""
        running = asyncio.create_task(AnswerStream(self.answer, self.encode, self.body).run())  # type: ignore[arg-type]
        await turns()
        yield
        await running


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def read_all(data: bytes) -> list[TextRecord | StreamEvent]:
    return RecordReader().feed(data)


OUTPUTS: list[tuple[tuple[int, ...], dict[str, object]]] = [
    ((104,), {"cached_tokens": 1}),
    (tuple("é".encode()[:1]), {}),
    (tuple("é".encode()[1:]), {}),
    ((), {}),
    (tuple(b'"\\\n'), {}),
    (tuple("😀".encode()), {"finish_reason": "length"}),
]


@pytest.mark.parametrize("accept", [MEDIA_TYPE, "*/*"])
@pytest.mark.parametrize("thinks", [False, True])
@asynchronous
async def test_what_is_written_is_what_is_sent(accept: str, thinks: bool) -> None:
    messages = {"prompt": None, "messages": (ChatMessage(role="user", content="?"),)} if thinks else {}
    written, sent = (Asked(accept=accept, thinks=thinks, **messages) for _ in range(2))
    tokens = [((*b"hm</think>so ",), {}), *OUTPUTS] if thinks else OUTPUTS
    async with written.streaming():
        for ids, changes in tokens:
            written.put(*ids, **changes)
            await turns()
    for ids, changes in tokens:
        sent.put(*ids, **changes)
    whole = b"".join([part async for part in parts(sent.answer, sent.encode)])
    assert b"".join(written.body.written) == whole
    assert written.media_type == (MEDIA_TYPE if accept == MEDIA_TYPE else LINES_MEDIA_TYPE)


@asynchronous
async def test_text_is_records_and_all_else_is_events() -> None:
    asked = Asked()
    async with asked.streaming():
        for ids, changes in OUTPUTS:
            asked.put(*ids, **changes)
            await turns()
    assert read_all(b"".join(asked.body.written)) == [
        Started(prompt_tokens=2),
        TextRecord((104,), 1, b'data: {"text":"h"}\n\n'),
        TextRecord((0xC3,), 0, b""),
        TextRecord((0xA9,), 1, 'data: {"text":"é"}\n\n'.encode()),
        TextRecord(tuple(b'"\\\n'), 3, b'data: {"text":"\\"\\\\\\n"}\n\n'),
        TextRecord(tuple("😀".encode()), 1, 'data: {"text":"😀"}\n\n'.encode()),
        Finished(finish_reason="length", prompt_tokens=2, completion_tokens=10, cached_tokens=1),
    ]
    assert len(asked.body.written) == 6, "one write for each output with tokens, and one before them"


@asynchronous
async def test_log_probabilities_are_events_of_each_token() -> None:
    asked = Asked(sampling=Sampling(logprobs=0))
    async with asked.streaming():
        for number in (65, 66):
            asked.put(number, scores=(TokenScore(logprob=-1.0),))
        asked.put(finish_reason="length")
    _, *tokens, _ = read_all(b"".join(asked.body.written))
    assert [(token.text, len(token.logprobs)) for token in tokens if isinstance(token, Token)] == [("A", 1), ("B", 1)]


@pytest.mark.parametrize(
    ("changes", "accept"), [({"text_frame": None}, MEDIA_TYPE), ({}, "application/json"), ({}, "")]
)
@asynchronous
async def test_who_does_not_ask_for_records_gets_lines(changes: dict[str, None], accept: str) -> None:
    asked = Asked(accept=accept, **changes)
    async with asked.streaming():
        asked.put(104, finish_reason="length")
    lines = decode_lines(b"".join(asked.body.written))
    assert [type(line) for line in lines] == [Started, Token, Finished]


@asynchronous
async def test_a_reader_that_does_not_keep_up_holds_back_tokens_and_not_the_answer_of_another() -> None:
    slow, other = Asked(), Asked()
    made: list[int] = []
    feed_all = slow.text.feed_all

    def noted(token_ids: Sequence[int]) -> object:
        made.extend(token_ids)
        return feed_all(token_ids)

    slow.text.feed_all = noted  # type: ignore[method-assign, assignment]
    async with slow.streaming(), other.streaming():
        slow.body.full = True
        for number in range(2000):
            slow.put(65 + number % 26)
            other.put(65 + number % 26)
            await asyncio.sleep(0)
        slow.put(90, finish_reason="length")
        other.put(90, finish_reason="length")
        await until(lambda: other.answer.ended)
        assert len(slow.body.written) == 1
        assert not made, "no text is made for what is not written"
        assert not slow.answer.ended
        slow.body.full = False
        slow.body.on_room()
    answers = [read_all(b"".join(one.body.written)) for one in (slow, other)]
    tokens = [
        [i for record in answer if isinstance(record, TextRecord) for i in record.token_ids] for answer in answers
    ]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 2001
    assert len(answers[0]) < 20, "what was held back is joined"
    assert answers[0][-1] == answers[1][-1]


@asynchronous
async def test_what_waits_when_there_is_room_is_written_until_there_is_none() -> None:
    asked = Asked()
    body = asked.body
    async with asked.streaming():
        body.full = True
        for _ in range(1000):
            asked.put(65)
        body.full = False
        write, written = body.write, len(body.written)

        def fill(data: bytes) -> None:
            write(data)
            body.full = True

        body.write = fill  # type: ignore[method-assign]
        body.on_room()
        assert len(body.written) == written + 1
        body.write = write  # type: ignore[method-assign]
        body.full = False
        body.on_room()
        asked.put(finish_reason="length")
    finished = read_all(b"".join(body.written))[-1]
    assert isinstance(finished, Finished)
    assert finished.completion_tokens == 1000


@asynchronous
async def test_a_stream_ends_with_its_failure_its_stop_string_or_its_reader() -> None:
    failed, stopped, left = Asked(), Asked(sampling=Sampling(stop=("B",))), Asked()
    async with failed.streaming():
        failed.put(65)
        failed.inflight.outputs.put(WorkerLostError("gone"))
    *_, token, last = read_all(b"".join(failed.body.written))
    assert isinstance(last, Failed)
    assert isinstance(token, TextRecord)
    async with stopped.streaming():
        stopped.put(65, 66, 67)
        stopped.put(68)
    *_, token, last = read_all(b"".join(stopped.body.written))
    assert isinstance(token, TextRecord)
    assert (token.token_ids, token.chars) == ((65, 66), 1)
    assert isinstance(last, Finished)
    assert (last.finish_reason, stopped.cancelled) == ("stop", ["r"])
    async with left.streaming():
        left.body.on_lost()
        left.put(65)
    assert len(left.body.written) == 1


@pytest.mark.parametrize("way", ["written", "sent"])
@asynchronous
async def test_an_answer_that_cannot_be_made_fails_for_good_and_breaks_no_connection(way: str) -> None:
    asked = Asked()
    with capture_logs() as logged:
        if way == "written":
            async with asked.streaming():
                asked.put(65)
                await turns()
                asked.put("no token")  # type: ignore[arg-type]
            data = b"".join(asked.body.written)
        else:
            asked.put(65)
            asked.put("no token")  # type: ignore[arg-type]
            data = b"".join([part async for part in parts(asked.answer, asked.encode)])
    *_, token, last = read_all(data)
    assert isinstance(token, TextRecord)
    assert isinstance(last, Failed)
    assert (last.status, last.code, last.retryable) == (500, "answer_failed", False)
    assert [(line["event"], line["request_id"], line["exc_info"]) for line in logged] == [
        ("an answer cannot be made", "r", True)
    ]
    assert 'finished_reason="error",model_name="tide"} 1.0' in generate_latest(asked.registry).decode()


@asynchronous
async def test_an_answer_whose_beginning_cannot_be_made_fails_too() -> None:
    asked = Asked()
    asked.answer.begin = lambda: [Token(text="\ud83d")]  # type: ignore[method-assign]
    async with asked.streaming():
        pass
    [failed] = read_all(b"".join(asked.body.written))
    assert isinstance(failed, Failed)


async def stream_of(client: httpx.AsyncClient, body: Generate, accept: str) -> tuple[str, bytes]:
    async with client.stream(
        "POST", "/generate", content=msgspec.json.encode(body), headers={"accept": accept}
    ) as response:
        return response.headers["content-type"], await response.aread()


def joined(records: Sequence[TextRecord | StreamEvent]) -> tuple[list[int], str, StreamEvent | TextRecord]:
    texts = [record for record in records if isinstance(record, TextRecord)]
    pieces = [record.payload.removeprefix(FRAME[0].encode()).removesuffix(FRAME[1].encode()) for record in texts]
    text = "".join(msgspec.json.decode(piece) for piece in pieces if piece)
    assert sum(record.chars for record in texts) == len(text)
    return [i for record in texts for i in record.token_ids], text, records[-1]


@asynchronous
async def test_a_node_answers_with_records_over_any_server() -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        asgi = httpx.ASGITransport(app=make_app(node.agent))
        async with httpx.AsyncClient(transport=asgi, base_url="http://x", headers=node.client.headers) as inner:
            answers = []
            for number, client in enumerate((node.client, inner)):
                kind, data = await stream_of(client, generate(f"r{number}", text_frame=FRAME), MEDIA_TYPE)
                assert kind == MEDIA_TYPE
                answers.append(joined(read_all(data)))
            kind, data = await stream_of(node.client, generate("lines", text_frame=FRAME), "*/*")
            assert kind == LINES_MEDIA_TYPE
            lines = decode_lines(data)
        assert answers[0] == answers[1]
        text = "".join(line.text for line in lines if isinstance(line, Token))
        assert answers[0] == (token_ids(lines), text, lines[-1])
        assert len(answers[0][0]) == 20


def raw(body: Generate, node: Node) -> bytes:
    data = msgspec.json.encode(body)
    key = node.client.headers["authorization"]
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


@asynchronous
async def test_who_never_reads_loses_its_request_while_another_goes_on() -> None:
    node_settings = settings(unread_time_max_s=0.5, slots=workers(8), replay_speed=1e6)
    async with running_node(node_settings) as node:
        await node.hold(1, instance(context_tokens=10**6, kv_bytes_per_token=1))
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, *address(node))
        transport.pause_reading()
        transport.write(raw(generate("unread", max_tokens=10**6 - 10), node))
        await until(lambda: node.in_flight() == 1)
        read = await stream_of(node.client, generate("read", max_tokens=200), "*/*")
        assert isinstance(decode_lines(read[1])[-1], Finished)
        await until(lambda: node.in_flight() == 0)
        assert 'finished_reason="abort",model_name="tide"} 1.0' in (await node.client.get("/metrics")).text
        transport.close()


def address(node: Node) -> tuple[str, int]:
    url = node.client.base_url
    assert url.port is not None
    return url.host, url.port


@asynchronous
async def test_a_thousand_streams_at_a_time() -> None:
    count, tokens = 1000, 20
    async with running_node(settings(queue_max=count, batch_max=count, slots=workers(1, 1))) as node:
        await node.hold(1, instance(kv_bytes_per_token=8), instance("i2", slot=1, name="ebb", kv_bytes_per_token=8))

        async def one(number: int) -> int:
            reader, writer = await asyncio.open_connection(*address(node))
            at = {"instance_id": "i2", "model": "ebb"} if number % 2 else {}
            writer.write(raw(generate(f"r{number}", max_tokens=tokens, **at), node))
            answer = await reader.readuntil(b"0\r\n\r\n")
            writer.close()
            assert b'"finish_reason":"length"' in answer
            return int(answer.split(b'"completion_tokens":')[1].split(b"}")[0])

        assert await asyncio.gather(*map(one, range(count))) == [tokens] * count
        await node.until(node.idle)
