"""The client of streams: what it counts of an agent's answers and of OpenAI's, however they are cut into pieces."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ops.bench.engine.streams import Server, Stream, StreamError, compare, draw_of, prompts_of, run_streams
from ops.bench.streaming import chunk

LINES = [
    b'{"type":"started","prompt_tokens":2}\n',
    b'{"type":"token","text":" a","token_ids":[1]}\n',
    b'{"type":"token","text":" b c","token_ids":[2,3]}\n',
    b'{"type":"finished","finish_reason":"length","prompt_tokens":2,"completion_tokens":3}\n',
]
EVENTS = [
    b'data: {"choices":[{"text":" a","token_ids":[1]}]}\n\n',
    b'data: {"choices":[{"text":" b c","token_ids":[2,3]}]}\n\n',
    b"data: [DONE]\n\n",
]
Asked = list[tuple[str, dict[str, Any]]]


async def served(answer: bytes, work: Callable[[int], Coroutine[Any, Any, Any]], *, cut: int, asked: Asked) -> Any:
    """Answer each request with the same bytes, `cut` of them at a time."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.partition("content-length: ")[2].split("\r\n")[0])
        asked.append((head.split()[1], json.loads(await reader.readexactly(length))))
        for start in range(0, len(answer), cut):
            writer.write(answer[start : start + cut])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    async with server:
        return await work(server.sockets[0].getsockname()[1])


def answer_of(pieces: list[bytes]) -> bytes:
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(map(chunk, [*pieces, b""]))


def run(api: str, answer: bytes, *, cut: int = 10_000, max_tokens: int = 3) -> tuple[list[Stream], Asked]:
    asked: Asked = []

    async def work(port: int) -> list[Stream]:
        server = Server(api="agent" if api == "agent" else "openai", port=port, key="k", model="m", instance="i")
        prompts = prompts_of(1, count=2, tokens=4)
        return await run_streams(
            [(server, prompt) for prompt in prompts], name="r", max_tokens=max_tokens, temperature=1.0
        )

    return asyncio.run(served(answer, work, cut=cut, asked=asked)), asked


@pytest.mark.parametrize("cut", [1, 7, 10_000])
@pytest.mark.parametrize(("api", "pieces"), [("agent", LINES), ("openai", EVENTS)])
def test_tokens_are_counted_however_the_answer_is_cut(api: str, pieces: list[bytes], cut: int) -> None:
    streams, _ = run(api, answer_of(pieces), cut=cut)
    assert [stream.tokens for stream in streams] == [[1, 2, 3]] * 2
    assert all(stream.ttft_s > 0 for stream in streams)


def test_both_are_asked_for_the_same() -> None:
    (_, ours), (_, theirs) = run("agent", answer_of(LINES)), run("openai", answer_of(EVENTS))
    assert [path for path, _ in ours + theirs] == ["/generate"] * 2 + ["/v1/completions"] * 2
    asked = [
        (body["prompt_tokens"], body["sampling"]["max_tokens"], body["sampling"]["ignore_eos"]) for _, body in ours
    ]
    assert sorted(asked) == sorted((body["prompt"], body["max_tokens"], body["ignore_eos"]) for _, body in theirs)
    assert {body["sampling"].get("temperature", 1.0) for _, body in ours} == {body["temperature"] for _, body in theirs}


def test_an_answer_that_is_no_answer_is_an_error() -> None:
    with pytest.raises(StreamError, match="asked for 4 tokens, got 3"):
        run("openai", answer_of(EVENTS), max_tokens=4)
    with pytest.raises(StreamError, match="status 429: busy"):
        run("agent", b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nbusy")
    with pytest.raises(StreamError, match="no memory"):
        run("agent", answer_of([b'{"type":"failed","status":503,"code":"x","message":"no memory"}\n']))
    with pytest.raises(StreamError, match="closed the connection"):
        run("agent", answer_of(LINES)[:-5])


def test_a_draw_is_told_by_its_streams() -> None:
    one = Stream(sent_s=0.0, pieces_s=[1.0, 2.0, 4.0], tokens=[1, 2, 3])
    two = Stream(sent_s=1.0, pieces_s=[4.0, 5.0], tokens=[1, 2])
    draw = draw_of([one, two])
    assert draw.tokens_per_s == pytest.approx(5 / 5)
    assert (draw.ttft_s, draw.ttft_longest_s) == (2.0, 3.0)
    assert (draw.gap_s, draw.gap_longest_s) == (1.0, 2.0)


def test_arms_take_turns_in_alternating_order_with_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[list[str], list[Any]]] = []

    async def streams(asked: list[tuple[Server, Any]], **_: object) -> list[Stream]:
        sent.append(([server.model for server, _ in asked], [prompt for _, prompt in asked]))
        return [Stream(sent_s=0.0, pieces_s=[1.0, 2.0], tokens=[1, 2]) for _ in asked]

    monkeypatch.setattr("ops.bench.engine.streams.run_streams", streams)
    a, b, c = (Server(api="agent", port=1, key="k", model=name) for name in "abc")
    options: dict[str, Any] = {"prompt_tokens": 3, "max_tokens": 2, "temperature": 1.0}
    rows = compare({"x": [a], "y": [b, c]}, loads=[3], draws=2, **options)
    x, y = ["a", "a", "a"], ["b", "c", "b"]
    assert [models for models, _ in sent] == [y, x, x, y, y, x]
    assert all(sent[number][1] == sent[number + 1][1] for number in (0, 2, 4))
    assert sent[0][1] != sent[2][1]
    assert [(row["arm"], row["streams"], row["draws"]) for row in rows] == [("x", 3, 2), ("y", 3, 2)]
