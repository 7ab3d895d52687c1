"""Embeddings and scores of a node: what is refused, what reaches the engine, and what comes back."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.agent.pooled_answers import pooled_prompt
from dataplane.agent.tokenization import load_tokenizer
from dataplane.checkpoints.pooling import EmbeddingRules, ScoreRules
from dataplane.engines.replay.vocabulary import REPLAY_EMBEDDING_SIZE
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.messages import (
    ChatMessage,
    DesiredInstance,
    Finished,
    Generate,
    ModelSpec,
    Pooled,
    Sampling,
    Started,
    StreamEvent,
    Task,
)
from tests.dataplane.agent.test_tokenization import write_tokenizer
from tests.dataplane.agent.test_torch_node import checkpoint, torch_settings
from tests.dataplane.engines.torch.pooled import (
    reference_embedding,
    reference_score,
    save_scoring,
    write_modules,
)
from tests.dataplane.replay_node import Node, generate, instance, running_node
from tests.dataplane.streams import read
from tests.event_loop import asynchronous

RULES = EmbeddingRules(size=8, prompts={"query": "find: ", "document": ""}, default_prompt="say: ")
PAIR = (ChatMessage(role="query", content="the tide"), ChatMessage(role="document", content="turns at noon"))


def asked(request_id: str = "r", **changes: Any) -> Generate:
    return generate(request_id, sampling=Sampling(), pooling=True, **changes)


def values(events: list[StreamEvent]) -> tuple[float, ...]:
    """Those of a stream that is well-formed."""
    started, pooled, finished = events
    assert isinstance(started, Started)
    assert isinstance(pooled, Pooled)
    assert finished == Finished(finish_reason="stop", prompt_tokens=started.prompt_tokens, completion_tokens=0)
    return pooled.values


async def refusal(node: Node, body: Generate) -> tuple[int, str, str]:
    answer = await node.post(body)
    failed = answer.json()
    return answer.status_code, failed["param"], failed["message"]


@asynchronous
async def test_a_replayed_node_embeds_scores_and_refuses_what_is_not_of_a_models_task() -> None:
    instances = [
        instance("i1"),
        instance("i2", name="embedding", task="embed"),
        instance("i3", name="scoring", task="score"),
    ]
    async with running_node() as node:
        await node.hold(1, *instances)
        embedding = {"instance_id": "i2", "model": "embedding"}
        whole = values(await read(node, asked("a", **embedding)))
        assert len(whole) == REPLAY_EMBEDDING_SIZE
        cut = values(await read(node, asked("b", dimensions=16, **embedding)))
        length = math.hypot(*whole[:16])
        assert cut == pytest.approx([value / length for value in whole[:16]])
        (score,) = values(await read(node, asked("c", instance_id="i3", model="scoring", prompt=None, messages=PAIR)))
        assert 0 <= score < 1

        status, param, message = await refusal(node, asked("d"))
        assert (status, param) == (400, "model")
        assert "tide answers with text" in message
        status, param, message = await refusal(node, generate("e", **embedding))
        assert (status, param) == (400, "model")
        assert "embedding answers with embeddings" in message
        status, param, _ = await refusal(node, asked("f", dimensions=REPLAY_EMBEDDING_SIZE + 1, **embedding))
        assert (status, param) == (400, "dimensions")
        status, param, message = await refusal(node, asked("g", prompt="tide " * 5000, **embedding))
        assert (status, param) == (400, "prompt")
        assert "at most 2048" in message
        await node.until(node.idle)


def test_a_prompt_of_the_checkpoint_precedes_a_text_and_no_tokens() -> None:
    assert pooled_prompt(asked(prompt="x"), RULES).prompt == "say: x"
    assert pooled_prompt(asked(prompt="x", prompt_name="query"), RULES).prompt == "find: x"
    assert pooled_prompt(asked(prompt="x", prompt_name="document"), RULES).prompt == "x"
    assert pooled_prompt(asked(prompt=None, prompt_tokens=(1, 2)), RULES).prompt_tokens == (1, 2)
    with pytest.raises(BadRequestError, match="it has document, query"):
        pooled_prompt(asked(prompt="x", prompt_name="other"), RULES)


def test_dimensions_are_those_of_the_checkpoint() -> None:
    rules = EmbeddingRules(size=8, shorter=(2, 4))
    for size in (2, 4, 8, None):
        pooled_prompt(asked(dimensions=size), rules)
    for size in (0, 3, 9):
        with pytest.raises(BadRequestError):
            pooled_prompt(asked(dimensions=size), rules)


def test_a_causal_model_is_asked_whether_a_document_answers_a_query() -> None:
    pair = asked(prompt=None, messages=PAIR)
    prompt = pooled_prompt(pair, ScoreRules(tokens=("no", "yes"))).prompt
    assert prompt is not None
    assert "<Query>: the tide\n<Document>: turns at noon<|im_end|>" in prompt
    assert pooled_prompt(pair, ScoreRules()) == pair
    with pytest.raises(BadRequestError, match="query and document"):
        pooled_prompt(asked(prompt=None, messages=PAIR[:1]), ScoreRules())


PAIR_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'query' %}find {{ m['content'] }}"
    "{% elif m['role'] == 'document' %} in {{ m['content'] }}?{% endif %}{% endfor %}"
)


def pooled_checkpoint(folder: Path, task: Task, *, name: str = "score", template: str | None = None) -> ModelSpec:
    """A tiny model of the task with the tokenizer of `checkpoint`."""
    if task == "embed":
        spec = checkpoint(folder, "embed")
        write_modules(folder, pooled="mean")
        (folder / "config_sentence_transformers.json").write_text(
            json.dumps({"prompts": {"query": "find "}, "default_prompt_name": None})
        )
        return ModelSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"task": task})
    save_scoring("llama", folder, vocab_size=258, eos_token_id=257, bos_token_id=256)
    write_tokenizer(folder, template)
    size = (folder / "model.safetensors").stat().st_size
    return ModelSpec(
        name=name, path=str(folder), weights_bytes=size, kv_bytes_per_token=576, context_tokens=256, task=task
    )


@pytest.mark.slow
@asynchronous
async def test_a_torch_node_embeds_and_scores_as_transformers_does(tmp_path: Path) -> None:
    embedding, scoring = (pooled_checkpoint(tmp_path / task, task) for task in ("embed", "score"))
    asking = pooled_checkpoint(tmp_path / "asking", "score", name="asking", template=PAIR_TEMPLATE)
    specs = [embedding, scoring, asking]
    async with running_node(torch_settings(1)) as node:
        await node.hold(1, *(DesiredInstance(instance_id=spec.name, slot=0, gpus=1, model=spec) for spec in specs))
        text = {"instance_id": "embed", "model": "embed", "prompt": "the tide turns"}
        tokenizer = load_tokenizer(embedding.path, "torch")
        for name, prefix in ((None, ""), ("query", "find ")):
            prompt = tokenizer.encode_text(f"{prefix}the tide turns", tokens_max=100)
            expected = reference_embedding(Path(embedding.path), prompt, pooled="mean")
            made = values(await read(node, asked(f"e-{name}", prompt_name=name, **text)))
            assert torch.allclose(torch.tensor(made), expected, atol=1e-3)
        pair = tokenizer.encode_pair("the tide", "turns at noon", tokens_max=100)
        (score,) = values(await read(node, asked("s", instance_id="score", model="score", prompt=None, messages=PAIR)))
        assert score == pytest.approx(reference_score(Path(scoring.path), pair), abs=1e-3)
        rendered = tokenizer.encode_text("find the tide in turns at noon?", tokens_max=100, special=False)
        body = asked("a", instance_id="asking", model="asking", prompt=None, messages=PAIR)
        (score,) = values(await read(node, body))
        assert score == pytest.approx(reference_score(Path(asking.path), rendered), abs=1e-3)
        await node.until(node.idle)
