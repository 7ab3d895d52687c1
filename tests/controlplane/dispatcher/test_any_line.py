"""Whatever the lines of a batch hold, one look ends their batch with errors that name them, or all of them run."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from controlplane.dispatcher.finalize import FINALIZE
from controlplane.dispatcher.ingest import VALIDATE
from controlplane.store import queue
from controlplane.store.blobs.base import BlobStore
from controlplane.store.queue import Outcome
from dataplane.protocol.messages import Generate
from tests.controlplane.world import World, claim_waiting

NESTED = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %s}'

decode = msgspec.json.Decoder(Generate).decode

hostile_text = st.one_of(
    st.text(st.characters(codec=None, exclude_categories=()), max_size=20),  # U+0000 and halves of pairs too
    st.sampled_from(["a\0b", "\ud800", "\udc00\ud800", "\ufeff", "\u2028", "\x7f", "\x1b[2J", "x" * 10_000, ""]),
)
hostile_numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([2**63, -(2**63) - 1, 2**64, 1e308, -0.0]),
)
values = st.recursive(
    st.none() | st.booleans() | hostile_numbers | hostile_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hostile_text, inner, max_size=3),
    max_leaves=8,
)
good_bodies = st.fixed_dictionaries(
    {"model": st.just("tide"), "prompt": st.text(max_size=10)},
    optional={"max_tokens": st.integers(1, 9), "seed": st.integers(-9, 9), "user": st.text(max_size=5)},
)
fields = st.sampled_from(["model", "prompt", "max_tokens", "stop", "user", "n", "stream", "seed", "metadata"])
bodies = st.one_of(
    good_bodies,
    st.builds(lambda body, key, value: {**body, key: value}, good_bodies, fields | hostile_text, values),
    values,
)
tops = st.sampled_from(["custom_id", "method", "url", "body"])


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A good line, or one in which something is wrong: a value, a key, its bytes."""
    line: Any = {
        "custom_id": draw(st.text(min_size=1, max_size=8)),
        "method": "POST",
        "url": "/v1/completions",
        "body": draw(bodies),
    }
    if draw(st.integers(0, 3)) == 0:
        line[draw(tops | hostile_text)] = draw(values)
    data = json.dumps(line, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    if draw(st.integers(0, 3)) == 0:
        data = draw(mangled(data))
    return data


def mangled(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes of a line after an accident."""
    middle = len(data) // 2
    return st.one_of(
        st.sampled_from(
            [
                b"\xef\xbb\xbf" + data,
                data.decode(errors="replace").encode("utf-16"),
                data[:middle],
                data + data,
                data + b"\r",
                b"\0" + data,
                data[:middle] + b"\xff" + data[middle:],
                data[:-1] + b', "custom_id": "again"}',
                data.replace(b'"tide"', b'"tide", "model": "other\\u0000"'),
                data.replace(b'"POST"', b"1e400"),
                data.replace(b'"POST"', b"9" * 5000),
                NESTED % (b"[" * 5000 + b"]" * 5000),
                NESTED % (b'{"a":' * 500 + b"1" + b"}" * 500),
                b'{"custom_id": ' + b"[" * 300 + b"]" * 300 + b', "method": ' + b"[" * 300 + b"]" * 300 + b"}",
            ]
        ),
        st.binary(max_size=40),
    )


@pytest.mark.slow
@given(st.lists(lines(), max_size=4))
@example(
    [b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "\\u0000", "prompt": ""}}']
)
@example([NESTED % b'{"model": "tide", "prompt": "", "\\u0000": 1}'])
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_its_batch_ends(world: World, blobs: BlobStore, written: list[bytes]) -> None:
    batch_id = world.add_batch()
    with blobs.writing(world.batch(batch_id).input_file_id) as stream:
        stream.write(b"\n".join(written))
    assert world.step(VALIDATE, blobs) == batch_id
    batch = world.batch(batch_id)
    if batch.state == "failed":
        assert batch.errors is not None
        check_errors(batch.errors)
        return
    assert batch.state == "in_progress", "one look is enough"
    with world.database.transaction() as session:
        held = claim_waiting(session)
        assert len(held) == batch.total > 0
        outcomes = [Outcome(claim=each, status_code=200, body={"echo": str(decode(each.body))}) for each in held]
        assert len(queue.finish(session, outcomes)) == batch.total
    assert [world.step(FINALIZE, blobs) for _ in range(2)] == [batch_id] * 2
    assert (world.batch(batch_id).state, world.batch(batch_id).completed) == ("completed", batch.total)


def check_errors(errors: dict[str, Any]) -> None:
    assert errors["object"] == "list"
    assert 1 <= len(errors["data"]) <= 100
    for error in errors["data"]:
        assert set(error) == {"code", "message", "param", "line"}
        assert error["code"] != "internal_error", "what is wrong with a line is its own fault, and is said"
        assert 0 < len(error["message"]) <= 500
        assert len(error["param"] or "") <= 200
    msgspec.json.encode(errors)
