"""What OpenAI's own client expects of a server: one stack of real processes, asked through the official library."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import openai
import pytest
from sqlalchemy import create_engine, text

from ops.client.api import Api
from ops.local.replay_stack import replayed_model
from ops.local.sample_fleet import POOL_REGION, TOKENS_PER_S, offer_model
from ops.local.stack import LocalStack
from tests.flows.conftest import REPLAY_NODES, admin_of, register, replay_stack, wait_ready, wait_seen
from tests.flows.waiting import wait_until

MODEL, ABSENT = "tide", "ebb"
"""A model with an instance, and one that is registered and has none."""
POOLED = {"drift": "embed", "shore": "score"}
"""Models that do not generate, and their tasks."""
PROMPT = [{"role": "user", "content": "what does the tide bring"}]
CHAT = "/v1/chat/completions"
LONG_TOKENS = 3000
"""Longer than any test waits for the end of it."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """One region, one node; its replayed GPU is slow, so that a stream lasts long enough to be left."""
    node = replace(REPLAY_NODES[0], settings={"replay_speed": 0.5})
    with replay_stack(tmp_path_factory.mktemp("openai"), (node,)) as running:
        with admin_of(running) as admin:
            register(admin, (MODEL,), (POOL_REGION,))
            register(admin, (ABSENT,), (POOL_REGION,), instances_min=0)
            for model, task in POOLED.items():
                admin.put(f"/admin/models/{model}", replayed_model(model, 512) | {"task": task})
                offer_model(admin, model, TOKENS_PER_S, [POOL_REGION.name], 1, 4)
            wait_ready(admin, 1 + len(POOLED))
        with _client(running) as client:
            wait_seen(client, MODEL)
        yield running


@pytest.fixture(scope="module")
def admin(stack: LocalStack) -> Iterator[Api]:
    with admin_of(stack) as api:
        yield api


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    with _client(stack) as made:
        yield made


def _client(stack: LocalStack, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        **{"base_url": f"{stack.url}/v1", "api_key": stack.keys["client"], "max_retries": 0, **options}
    )


@contextmanager
def _counting(stack: LocalStack, **options: Any) -> Iterator[tuple[openai.OpenAI, list[int]]]:
    """A client, and the status of every answer it got."""
    statuses: list[int] = []
    hooks = {"response": [lambda answer: statuses.append(answer.status_code)]}
    with openai.DefaultHttpxClient(event_hooks=hooks) as http, _client(stack, http_client=http, **options) as made:
        yield made, statuses


def _answers(client: openai.OpenAI) -> bool:
    try:
        client.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=1)
    except openai.APIStatusError:
        return False
    return True


def _said(client: openai.OpenAI, **options: Any) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=PROMPT, temperature=0, **options)
    return answer.choices[0].message.content or ""


class TestAnswers:
    def test_a_stream_says_what_the_whole_answer_says(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=12, temperature=0)
        chunks = list(
            client.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=12, temperature=0, stream=True)
        )
        assert whole.object == "chat.completion"
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert {c.object for c in chunks} == {"chat.completion.chunk"}
        assert len({c.id for c in chunks}) == 1
        assert all(c.usage is None for c in chunks)

    def test_usage_comes_in_a_last_chunk_without_choices(self, client: openai.OpenAI) -> None:
        *chunks, last = client.chat.completions.create(
            model=MODEL, messages=PROMPT, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 5
        assert all(chunk.choices for chunk in chunks)

    def test_a_stop_string_ends_the_text_before_itself(self, client: openai.OpenAI) -> None:
        words = _said(client, max_tokens=12).split()
        stop = next(word for word in words[3:] if word not in words[:3])
        answer = client.chat.completions.create(
            model=MODEL, messages=PROMPT, max_tokens=12, temperature=0, stop=[stop, "never said"]
        )
        assert answer.choices[0].finish_reason == "stop"
        assert stop not in (answer.choices[0].message.content or "")
        assert (answer.choices[0].message.content or "").split() == words[: words.index(stop)]

    def test_a_seed_repeats_a_sampled_answer(self, client: openai.OpenAI) -> None:
        sampled = [
            client.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=8, temperature=1, seed=seed)
            for seed in (7, 7, 8)
        ]
        first, again, other = (answer.choices[0].message.content for answer in sampled)
        assert first == again != other

    @pytest.mark.parametrize("prompt", ["a boat on the bay", ["a boat on the bay"], [1, 2, 3]])
    def test_completions_take_text_and_tokens(self, client: openai.OpenAI, prompt: str | list[Any]) -> None:
        whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0)
        stream = client.completions.create(model=MODEL, prompt=prompt, temperature=0, stream=True)
        assert whole.object == "text_completion"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 16
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text

    def test_the_tier_is_echoed(self, client: openai.OpenAI) -> None:
        for asked, served in (("auto", "default"), ("default", "default"), ("priority", "priority"), ("flex", "flex")):
            answer = client.chat.completions.create(
                model=MODEL,
                messages=PROMPT,
                max_tokens=1,
                service_tier=asked,  # type: ignore[arg-type]
            )
            assert answer.service_tier == served

    def test_models_are_listed_and_found(self, client: openai.OpenAI) -> None:
        assert {model.id for model in client.models.list()} == {MODEL, ABSENT, *POOLED}
        assert client.models.retrieve(MODEL).object == "model"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("no-such-model")


class TestEmbeddings:
    def test_both_encodings_give_the_same_unit_vectors_in_the_order_of_the_inputs(self, client: openai.OpenAI) -> None:
        inputs = ["the tide", "the ebb", "the tide", "the flood"]
        decoded = client.embeddings.create(model="drift", input=inputs)  # the client asks for base64
        plain = client.embeddings.create(model="drift", input=inputs, encoding_format="float")
        vectors = [each.embedding for each in plain.data]
        assert [each.index for each in plain.data] == [0, 1, 2, 3]
        assert [each.embedding for each in decoded.data] == vectors
        assert all(math.hypot(*vector) == pytest.approx(1) for vector in vectors)
        assert (vectors[0] == vectors[2], vectors[0] == vectors[1]) == (True, False)
        assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (8, 8)
        tokens = client.embeddings.create(model="drift", input=[1, 2, 3])
        assert (len(tokens.data), tokens.usage.prompt_tokens) == (1, 3)

    def test_dimensions_cut_and_normalize(self, client: openai.OpenAI) -> None:
        whole = client.embeddings.create(model="drift", input="the tide").data[0].embedding
        cut = client.embeddings.create(model="drift", input="the tide", dimensions=8).data[0].embedding
        assert cut == pytest.approx([value / math.hypot(*whole[:8]) for value in whole[:8]], abs=1e-6)
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="drift", input="the tide", dimensions=len(whole) + 1)
        assert refused.value.param == "dimensions"

    def test_what_cannot_be_embedded_is_400_and_named(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as too_long:
            client.embeddings.create(model="drift", input=["short", "wave " * 9000])
        assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input.1")
        with pytest.raises(openai.BadRequestError) as generates:
            client.embeddings.create(model=MODEL, input="the tide")
        assert (generates.value.code, generates.value.param) == ("model_not_supported", "model")
        with pytest.raises(openai.BadRequestError) as embeds:
            client.chat.completions.create(model="drift", messages=PROMPT)
        assert embeds.value.code == "model_not_supported"

    def test_scores_and_ranks(self, client: openai.OpenAI) -> None:
        texts = ["the tide", "a boat", "the ebb"]
        for model in POOLED:
            body = {"model": model, "text_1": "the tide", "text_2": texts}
            scores = [each["score"] for each in client.post("/score", body=body, cast_to=httpx.Response).json()["data"]]
            body = {"model": model, "query": "the tide", "documents": texts, "top_n": 2}
            ranked = client.post("/rerank", body=body, cast_to=httpx.Response).json()["results"]
            best = sorted(range(3), key=lambda index: -scores[index])[:2]
            assert [each["index"] for each in ranked] == best
            assert [each["relevance_score"] for each in ranked] == pytest.approx([scores[index] for index in best])
        assert len(set(scores)) == 3

    def test_a_batch_of_embeddings(self, client: openai.OpenAI) -> None:
        bodies = {"one": "the tide", "many": ["the ebb", "the flood"]}
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": {"model": "drift", "input": given}}
            for name, given in bodies.items()
        ]
        made = client.batches.create(
            input_file_id=_upload(client, *lines), endpoint="/v1/embeddings", completion_window="24h"
        )
        answered = _lines_of(client, _until(client, made.id, "completed").output_file_id)
        vectors = {
            name: [each["embedding"] for each in line["response"]["body"]["data"]] for name, line in answered.items()
        }
        for name, given in bodies.items():
            alone = client.embeddings.create(model="drift", input=given, encoding_format="float")
            assert vectors[name] == [each.embedding for each in alone.data]


class TestErrors:
    def test_an_unknown_model_is_404(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as refused:
            client.chat.completions.create(model="no-such-model", messages=PROMPT)
        assert refused.value.code == "model_not_found"
        assert set(refused.value.body or {}) == {"message", "type", "param", "code"}  # type: ignore[call-overload]

    def test_a_bad_field_is_400_and_named(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=PROMPT, temperature=3)
        assert refused.value.param == "temperature"
        assert refused.value.type == "invalid_request_error"

    def test_what_exceeds_the_context_is_400_in_a_stream_too(self, client: openai.OpenAI) -> None:
        """Only the node knows how many tokens the prompt has: one less than the context leaves no room for any."""
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=4095, stream=stream)
            assert refused.value.code == "context_length_exceeded"

    def test_a_wrong_key_is_401(self, stack: LocalStack) -> None:
        with _client(stack, api_key="tp-client-wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()

    def test_a_body_over_the_limit_is_413(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * (5 * 2**20)}])
        assert refused.value.status_code == 413

    def test_every_answer_has_a_request_id_and_keeps_a_plain_one(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=1)
        assert answer._request_id is not None
        assert answer._request_id.startswith("req_")
        mine = client.chat.completions.create(
            model=MODEL, messages=PROMPT, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
        )
        assert mine._request_id == "mine-1"
        assert mine.id == "chatcmpl-mine-1"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=PROMPT, top_p=7)
        assert refused.value.request_id is not None


class TestRetries:
    def test_the_client_retries_503_until_the_model_is_there(self, stack: LocalStack, admin: Api) -> None:
        with _counting(stack, max_retries=0) as (client, statuses), pytest.raises(openai.InternalServerError) as away:
            client.chat.completions.create(model=ABSENT, messages=PROMPT, max_tokens=2)
        assert statuses == [503]
        assert int(away.value.response.headers["retry-after"]) >= 1
        limits = {"model": ABSENT, "region": POOL_REGION.name, "instances_max": 4}
        admin.put("/admin/endpoints", {**limits, "instances_min": 1})
        with _counting(stack, max_retries=60) as (client, statuses):
            answer = client.chat.completions.create(model=ABSENT, messages=PROMPT, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
        assert statuses[-1] == 200
        assert set(statuses[:-1]) <= {503}

    def test_a_limit_is_429_and_the_client_waits_as_told(self, stack: LocalStack, admin: Api) -> None:
        admin.put("/admin/tenants/limited", {"requests_per_minute": 12})
        key = admin.post("/admin/keys", {"name": "limited", "role": "client", "tenant": "limited"})["secret"]
        with _counting(stack, api_key=key, max_retries=5) as (client, statuses):
            wait_until(lambda: _answers(client) and 429 in statuses, "the limit was met")
            raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=PROMPT, max_tokens=1)
        assert set(statuses) == {200, 429}
        assert raw.headers["x-ratelimit-limit-requests"] == "12"

    def test_what_a_retry_cannot_mend_is_asked_once(self, stack: LocalStack) -> None:
        with _counting(stack, max_retries=3) as (client, statuses):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model=MODEL, messages=PROMPT, temperature=3)
            with pytest.raises(openai.NotFoundError):
                client.batches.retrieve("batch_none")
        assert statuses == [400, 404]


class TestLeaving:
    """A client that goes away, or loses patience, frees the node at once."""

    def test_leaving_a_stream(self, client: openai.OpenAI, admin: Api) -> None:
        stream = client.chat.completions.create(
            model=MODEL, messages=PROMPT, max_tokens=LONG_TOKENS, stream=True, extra_body={"ignore_eos": True}
        )
        for _, _chunk in zip(range(3), stream, strict=False):
            pass
        wait_until(lambda: _in_flight(admin) == 1, "what was asked before has ended on the node too")
        stream.close()
        wait_until(lambda: _in_flight(admin) == 0, "the node is free")

    def test_a_timeout(self, client: openai.OpenAI, admin: Api) -> None:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=1.0).chat.completions.create(
                model=MODEL, messages=PROMPT, max_tokens=LONG_TOKENS, extra_body={"ignore_eos": True}
            )
        wait_until(lambda: _in_flight(admin) == 0, "the node is free")


def _in_flight(admin: Api) -> float:
    """Requests on the node, by its own metrics."""
    (node,) = admin.get("/admin/nodes")["data"]
    lines = httpx.get(f"{node['url']}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tidepool_requests_in_flight{"))


def _upload(client: openai.OpenAI, *lines: dict[str, Any]) -> str:
    content = "\n".join(json.dumps(line) for line in lines).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def _line(custom_id: str, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": PROMPT, "max_tokens": 3, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}


def _run(client: openai.OpenAI, file_id: str, **options: Any) -> openai.types.Batch:
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h", **options)


def _until(client: openai.OpenAI, batch_id: str, status: str) -> openai.types.Batch:
    wait_until(lambda: client.batches.retrieve(batch_id).status == status, f"the batch is {status}")
    return client.batches.retrieve(batch_id)


def _lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


class TestFiles:
    def test_a_file_from_its_upload_to_its_deletion(self, client: openai.OpenAI) -> None:
        content = b'{"a": 1}\n{"b": 2}\n'
        made = client.files.create(file=("mine.jsonl", content), purpose="batch")
        assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(content), "mine.jsonl", "batch")
        assert client.files.retrieve(made.id) == made
        assert client.files.content(made.id).content == content
        assert client.files.delete(made.id).deleted
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)

    def test_pages_follow_each_other_in_both_orders(self, client: openai.OpenAI) -> None:
        mine = [_upload(client, {"n": number}) for number in range(5)]
        newest = [file.id for file in client.files.list(limit=2, purpose="batch")]
        oldest = [file.id for file in client.files.list(limit=3, order="asc")]
        assert newest[:5] == mine[::-1]
        assert [file_id for file_id in oldest if file_id in mine] == mine
        page = client.files.list(limit=2)
        assert page.has_more
        assert [file.id for file in page.data] == newest[:2]
        assert [file.id for file in client.files.list(limit=2, after=mine[3]).data] == newest[2:4]

    def test_a_line_that_is_no_json_is_refused_with_its_number(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="line 2"):
            client.files.create(file=("bad.jsonl", b'{"a": 1}\n{nonsense\n'), purpose="batch")

    def test_expires_after(self, client: openai.OpenAI) -> None:
        made = client.files.create(
            file=("brief.jsonl", b'{"a": 1}\n'),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert made.expires_at == made.created_at + 7200


class TestBatches:
    def test_a_batch_gives_each_line_its_answer_or_its_error(self, client: openai.OpenAI) -> None:
        lines = [_line(f"r{n}", temperature=0) for n in range(6)]
        lines.append(_line("too-long", messages=[{"role": "user", "content": "wave " * 4200}]))
        made = _run(client, _upload(client, *lines), metadata={"job": "nightly"})
        assert made.status == "validating"
        assert made.metadata == {"job": "nightly"}
        batch = _until(client, made.id, "completed")
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(made.id)
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (7, 6, 1)
        for earlier, later in (("created_at", "in_progress_at"), ("in_progress_at", "completed_at")):
            assert getattr(batch, earlier) <= getattr(batch, later)

        answered = _lines_of(client, batch.output_file_id)
        assert set(answered) == {f"r{n}" for n in range(6)}
        said = _said(client, max_tokens=3)
        for line in answered.values():
            assert set(line) == {"id", "custom_id", "response", "error"}
            assert line["error"] is None
            assert line["response"]["status_code"] == 200
            assert line["response"]["request_id"]
            assert line["response"]["body"]["choices"][0]["message"]["content"] == said
        failed = _lines_of(client, batch.error_file_id)["too-long"]
        assert failed["error"] is None
        assert failed["response"]["status_code"] == 400
        assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"

    def test_one_bad_line_fails_the_batch_before_anything_runs(self, client: openai.OpenAI) -> None:
        lines = [_line("same"), _line("other", temperature=9), _line("same")]
        batch = _until(client, _run(client, _upload(client, *lines)).id, "failed")
        assert batch.errors is not None
        assert [error.line for error in batch.errors.data or []] == [2, 3]
        assert (batch.errors.data or [])[1].code == "duplicate_custom_id"
        assert batch.output_file_id is None

    def test_a_cancelled_batch_keeps_what_is_finished(self, client: openai.OpenAI, admin: Api) -> None:
        long = {"max_tokens": LONG_TOKENS, "ignore_eos": True}
        made = _run(client, _upload(client, *(_line(f"r{n}", **long) for n in range(4)), _line("short")))
        wait_until(lambda: _in_flight(admin) > 0, "a line runs")
        assert client.batches.cancel(made.id).status in {"cancelling", "cancelled"}
        batch = _until(client, made.id, "cancelled")
        assert batch.request_counts is not None
        assert batch.request_counts.total == 5
        lines = {
            **(_lines_of(client, batch.output_file_id) if batch.output_file_id else {}),
            **(_lines_of(client, batch.error_file_id) if batch.error_file_id else {}),
        }
        assert set(lines) == {"r0", "r1", "r2", "r3", "short"}
        wait_until(lambda: _in_flight(admin) == 0, "the node is free")
        assert client.batches.cancel(made.id).status == "cancelled"

    def test_a_batch_that_ends_too_late_says_so_line_by_line(self, client: openai.OpenAI, stack: LocalStack) -> None:
        long = {"max_tokens": LONG_TOKENS, "ignore_eos": True}
        made = _run(client, _upload(client, *(_line(f"r{n}", **long) for n in range(3))))
        _until(client, made.id, "in_progress")
        _past_deadline(stack, made.id)
        batch = _until(client, made.id, "expired")
        assert batch.expired_at is not None
        lines = _lines_of(client, batch.error_file_id)
        assert {line["error"]["code"] for line in lines.values()} == {"batch_expired"}
        assert {line["response"] for line in lines.values()} == {None}

    def test_pages_of_batches(self, client: openai.OpenAI) -> None:
        file_id = _upload(client, _line("only"))
        mine = [_run(client, file_id).id for _ in range(3)]
        listed = [batch.id for batch in client.batches.list(limit=2)]
        assert listed[:3] == mine[::-1]
        assert len(listed) == len(set(listed))
        assert client.batches.list(limit=1, after=mine[1]).data[0].id == mine[0]
        for batch_id in mine:
            _until(client, batch_id, "completed")

    def test_what_a_batch_may_not_be(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            _run(client, "file-none")
        with pytest.raises(openai.BadRequestError) as refused:
            client.batches.create(input_file_id="file-none", endpoint="/v1/images", completion_window="24h")
        assert refused.value.param == "endpoint"
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_none")

    def test_another_tenant_sees_nothing(self, client: openai.OpenAI, stack: LocalStack, admin: Api) -> None:
        file_id = _upload(client, _line("only"))
        batch = _run(client, file_id)
        key = admin.post("/admin/keys", {"name": "stranger", "role": "client", "tenant": "elsewhere"})["secret"]
        with _client(stack, api_key=key) as stranger:
            assert stranger.files.list().data == []
            assert stranger.batches.list().data == []
            for ask in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
                with pytest.raises(openai.NotFoundError):
                    ask(file_id)
            for ask_batch in (stranger.batches.retrieve, stranger.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    ask_batch(batch.id)
        _until(client, batch.id, "completed")


def _past_deadline(stack: LocalStack, batch_id: str) -> None:
    """Nobody waits an hour, the shortest window, in a test."""
    engine = create_engine(stack.database_url)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE batches SET deadline_at = now() - interval '1 s' WHERE id = :id"), {"id": batch_id}
        )
    engine.dispose()
